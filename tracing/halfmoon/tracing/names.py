"""Names of the spans and events that services record: one place, so that the timeline can rely on them.

One trace holds one request. The gateway's span is the root; prefill and decode are siblings under it::

    gateway.request                 · event `first_token`, attribute `halfmoon.ttft_ms`
    ├── conductor.schedule
    │   └── conductor.wait          for a worker with room, in fair order; only of requests that did
    ├── prefill.request
    │   ├── prefill.queue           in line for the engine
    │   ├── prefill.acquire         cached chunks made readable; one `chunk` each; `kvtier.acquire`, `kvtier.transfer`
    │   └── prefill.compute         the rest computed; one `chunk` each
    └── decode.request
        ├── decode.queue            in line for the engine
        ├── decode.wait_kv          chunks pulled as they become ready; one `chunk` each
        └── decode.generate
"""

from typing import Final

GATEWAY_REQUEST: Final = "gateway.request"
CONDUCTOR_SCHEDULE: Final = "conductor.schedule"
CONDUCTOR_WAIT: Final = "conductor.wait"
CONDUCTOR_REQUEST: Final = "conductor.request"
"""The root instead of `gateway.request`, where a request came straight over NATS, without a trace."""

PREFILL_REQUEST: Final = "prefill.request"
PREFILL_QUEUE: Final = "prefill.queue"
PREFILL_ACQUIRE: Final = "prefill.acquire"
PREFILL_COMPUTE: Final = "prefill.compute"

DECODE_REQUEST: Final = "decode.request"
DECODE_QUEUE: Final = "decode.queue"
DECODE_WAIT_KV: Final = "decode.wait_kv"
DECODE_GENERATE: Final = "decode.generate"

CHUNK: Final = "chunk"
"""One per chunk at each place where something happened to it: acquired or computed by prefill, pulled by decode."""

KVTIER_ACQUIRE: Final = "kvtier.acquire"
KVTIER_TRANSFER: Final = "kvtier.transfer"
KVTIER_DEMOTE: Final = "kvtier.demote"
KVTIER_PROMOTE: Final = "kvtier.promote"
KVTIER_EVICT: Final = "kvtier.evict"
"""Later life: in a trace of its own, with a link to the request that made the chunk."""
KVTIER_REPLICATE: Final = "kvtier.replicate"
"""The same, of a batch of chunks: each `kvtier.transfer` in it has the link."""

EVENT_FIRST_TOKEN: Final = "first_token"
"""On `gateway.request`, at the moment when the first token left for the client. TTFT ends here."""
