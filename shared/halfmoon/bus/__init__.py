"""Messages between processes: one `Bus` protocol, in memory and over NATS; typed messages are the layer above.

`protocol` says what a bus does, `memory` and `nats` do it, `codec` turns structs into bytes, and `endpoint` is what
services use.
"""
