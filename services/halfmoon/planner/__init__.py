"""Sizing advice: how much KV a model needs, and which chunk size suits the traffic.

kv_advice.py    the size of a model's KV, per token and per context
traced.py       how much of a prompt came before
chunk_advice.py for each chunk size: reuse, records, transfers, waste; and which to take
recording_file.py  writes a recording
recorder.py     hears the requests of a running system
plot.py         the advice as a picture
"""
