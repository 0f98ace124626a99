"""Sizing advice: how much KV a model needs, and which chunk size suits the traffic.

kv_advice.py    the size of a model's KV, per token and per context
traced.py       a request of a trace, and how much of its prompt came before
chunk_advice.py for each chunk size: reuse, records, transfers, waste; and which to take
trace_files.py  reads recordings, Mooncake's JSONL and Azure's CSV
recording.py    the format of recordings: what is written of a request, and what can't be read out of it again
recorder.py     hears the requests of a running system
plot.py         the advice as a picture
"""
