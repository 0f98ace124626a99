"""`request.split`: the two halves that a conductor sends, and what the workers say to each other and back.

conductor ── PrefillHalf ──▶ prefill ── KvReady… ──▶ decode ── Tokens…, Finished ──▶ client
    └─────── DecodeHalf ───────────────────────────▶ decode ── TransferDone ──▶ prefill
prefill, decode ── HalfEnded ──▶ conductor
"""

from enum import StrEnum

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import ChunkKey, ModelName, RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.requests import Encoding, RequestCancel, Sampling, Usage
from halfmoon.schemas.wire import Error, Message


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    """Both halves on one worker: for comparison, and for rolling back."""


class PrefillHalf(Message, frozen=True, tag="split.prefill.v1"):
    """Make the KV of a prompt readable on this worker's node, and tell the decode worker chunk by chunk."""

    request_id: RequestId
    transfer_id: TransferId
    conductor: WorkerId
    model: ModelName
    tenant: TenantId
    root: bytes
    """Root of the chunk keys: the namespace of model, dtype, layout and tenant, hashed. See `halfmoon.chunks`."""
    tokens: tuple[int, ...]
    reuse: tuple[tuple[ChunkSource, ...], ...]
    """For chunk 0, 1, …: the nodes that hold it, best first. Its length is the number of chunks to reuse."""
    decode_worker: WorkerId
    attempt: int = 1
    priority: int = 0
    """Higher goes first where halves wait for this worker."""
    deadline_ns: int | None = None
    """Of the request, in Unix nanoseconds. The header `halfmoon-deadline` where absent."""
    num_hot: int = 0
    """Leading chunks that this worker's engine is taken to hold: for estimates of its load. The engine knows better."""


class DecodeHalf(Message, frozen=True, tag="split.decode.v1"):
    """Generate, once the KV is there; or without it, once it is certain that it won't come."""

    request_id: RequestId
    transfer_id: TransferId
    conductor: WorkerId
    model: ModelName
    tenant: TenantId
    root: bytes
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    reply: str
    """Subject for token events."""
    encoding: Encoding = Encoding.MSGPACK
    receipt: str | None = None
    """Subject at which the request is acknowledged to the work queue: right after the client's terminal message, so
    that nobody runs it again, whoever dies then."""
    queue_seq: int | None = None
    """The request's number in the work queue, which has it until it is acknowledged."""
    prefill_worker: WorkerId | None = None
    """None: nothing to wait for; what the engine's own cache doesn't hold of the prompt is computed here."""
    known: tuple[int, ...] = ()
    """Completion tokens that the client may have already, where another worker had begun."""
    cached_tokens: int = 0
    """Prompt tokens from the cache, as that other worker found them: what the client is told in the end."""
    num_hot: int = 0
    """Leading chunks that this worker's engine is taken to hold: for estimates of its load. The engine knows better."""
    service_class: str | None = None
    """Of the request: every conductor counts what each class and tenant is served. None: `interactive`."""
    begins_in_s: float | None = None
    """When its first token is expected, from now: every conductor foresees the load of the decode workers."""
    waited_s: float = 0.0
    """Since the request arrived at its conductor."""
    attempt: int = 1
    """A half of a transfer that runs, with a higher attempt, names another prefill worker for it; nothing else changes.
    Where the transfer doesn't run, it begins nothing."""
    priority: int = 0
    """Higher goes first where halves wait for this worker."""
    deadline_ns: int | None = None
    """Of the request, in Unix nanoseconds. The header `halfmoon-deadline` where absent."""


class HalfAccepted(Message, frozen=True, tag="half.accepted.v1"):
    """The immediate answer to a half; a refusal is a `wire.Error` with code `busy` and the reason."""

    request_id: RequestId


class ReadyChunk(Message, frozen=True):
    """One chunk that can now be pulled from the prefill worker's node."""

    key: ChunkKey
    index: int
    num_tokens: int
    num_bytes: int
    outcome: ChunkOutcome
    """How prefill came by it: `hit_local`, `hit_remote` or `computed`."""


class KvReady(Message, frozen=True, tag="kv.ready.v1"):
    """These chunks of a transfer are readable. Sent as each is finished, while later ones are still computed."""

    request_id: RequestId
    transfer_id: TransferId
    source: ChunkSource
    chunks: tuple[ReadyChunk, ...]
    num_chunks: int
    """Of the whole transfer, the partial one included."""
    cached_tokens: int
    """Prompt tokens that prefill found in the pool."""
    worker: WorkerId | None = None
    """Who sends this, and is to be told `TransferDone`: another than the half named, after a new attempt."""


class KvFailed(Message, frozen=True, tag="kv.failed.v1"):
    """No more chunks will come for this transfer; decode computes the rest itself."""

    request_id: RequestId
    transfer_id: TransferId
    error: Error
    worker: WorkerId | None = None


class TransferDone(Message, frozen=True, tag="transfer.done.v1"):
    """Decode has what it needs (or gave up): prefill may let go of its leases."""

    request_id: RequestId
    transfer_id: TransferId


class HalfEnded(Message, frozen=True, tag="half.ended.v1"):
    """A half has reached its end. Decode's is sent after the client's terminal message."""

    request_id: RequestId
    transfer_id: TransferId
    worker: WorkerId
    role: Role
    error: Error | None = None
    num_reused_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    duration_s: float = 0.0
    ttft_s: float | None = None
    """Decode's: from its acceptance to its first token. None where there was none, or a completion went on."""
    tbt_s: float | None = None
    """Decode's: between tokens, on average. None where fewer than two came."""
    usage: Usage | None = None
    """Decode's: of the whole request so far, what other decode workers generated of it included."""


class HalfClaim(Message, frozen=True, tag="half.claim.v1"):
    """A decode worker was cut off, or stood still, and may have been taken for lost: is the request still its own?

    All conductors hear it, and only the one that knows answers: with `half.claimed.v1`, or with `busy` while it is not
    decided who goes on.
    """

    request_id: RequestId
    transfer_id: TransferId
    worker: WorkerId
    is_repeated: bool = False
    """Nobody answered before: the conductor that has it may be gone. Then others answer by what they heard it send."""


class HalfClaimed(Message, frozen=True, tag="half.claimed.v1"):
    """The answer to a claim."""

    is_held: bool
    """False: another goes on with the request, or it has ended; the worker drops it without a word to the client."""


class RequestTaken(Message, frozen=True, tag="request.taken.v1"):
    """A conductor has got a request that was delivered to some conductor before. One that still holds it, since it or
    the broker stood still meanwhile, lets go of it without a word."""

    request_id: RequestId
    conductor: WorkerId
    num_delivered: int
    """Whose delivery is the later one has the request."""


PrefillInbox = PrefillHalf | TransferDone | RequestCancel
"""What a prefill worker hears on its split subject (and cancels)."""

DecodeInbox = DecodeHalf | RequestCancel
"""What a decode worker hears on its split subject (and cancels)."""

KvInbox = KvReady | KvFailed
"""What a decode worker hears on its `kv.ready` subject."""
