"""Messages, ids and subjects: what the services say to each other. No I/O here.

One file per receiver: `requests` is the public protocol, `splits` what workers get from a
conductor, `kv_tier` what a pool answers, `chunks` the event stream, `registry` look-ups, `members` heartbeats.
"""
