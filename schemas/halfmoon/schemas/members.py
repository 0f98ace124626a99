"""Heartbeats: who is there, and how busy. Core NATS on `halfmoon.worker.<id>.heartbeat`, every 250 ms or faster."""

from enum import StrEnum

import msgspec

from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.measurements import DecodeSample, PrefillSample, PullSample
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.schemas.scheduling import SchedulingReport
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Message

HEARTBEAT_INTERVAL_S = 0.25
MEMBER_LOST_AFTER_S = 2.0
"""A member whose heartbeat is this late is taken for dead: eight missed in a row."""


class MemberState(StrEnum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class RequestProgress(Message, frozen=True):
    request_id: RequestId
    num_tokens: int
    """Completion tokens so far (decode); prompt tokens computed so far (prefill)."""
    new_tokens: tuple[int, ...] = ()
    """Decode only: the tokens since the last heartbeat, so that another worker could go on from them."""
    cached_tokens: int = 0
    """Decode only: prompt tokens that came from the cache. Known once there are new tokens."""


class WorkerHeartbeat(Message, frozen=True, tag="heartbeat.worker.v1"):
    """A prefill, decode or colocated worker."""

    worker: WorkerId
    role: Role
    node: NodeId
    started_ns: int
    state: MemberState
    load_progress: float = 1.0
    """0..1 while `loading`."""
    card: ModelCard | None = None
    """None until the model is loaded."""
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens that wait to be computed, here."""
    free_tokens: int = 0
    """KV that the engine has left, in tokens."""
    total_tokens: int = 0
    max_requests: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    requests: tuple[RequestProgress, ...] = ()
    pid: int = 0
    queued_pairs: float = 0.0
    """`queued_tokens`, as pairs of a token to compute and one that it attends to: what grows with a prompt's square."""
    context_tokens: int = 0
    """Of all requests that it decodes, in sum: prompts, and completions so far."""
    prefills: tuple[PrefillSample, ...] = ()
    """Measured since the last heartbeat; so are `decodes`."""
    decodes: tuple[DecodeSample, ...] = ()
    orders_seq: int = 0
    """The last flush that the engine's own prefix cache has heard of."""


class NodeHeartbeat(Message, frozen=True, tag="heartbeat.node.v1"):
    """A kv-tier."""

    worker: WorkerId
    node: NodeId
    epoch: int
    started_ns: int
    state: MemberState
    host: str
    slot_bytes: int = 0
    pool: PoolStats | None = None
    queued_transfers: int = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    pid: int = 0
    receiving: dict[NodeId, int] = msgspec.field(default_factory=dict)
    """Bytes on their way here, by the node that they come from."""
    pulls: tuple[PullSample, ...] = ()
    """Measured since the last heartbeat."""
    orders_seq: int = 0
    """The last of the registry's standing orders that is carried out here."""


class ServiceHeartbeat(Message, frozen=True, tag="heartbeat.service.v1"):
    """A gateway, conductor or registry."""

    worker: WorkerId
    service: str
    started_ns: int
    state: MemberState
    address: str = ""
    pid: int = 0
    prompt_tokens: int = 0
    """Conductors only: of the requests that have ended since their start."""
    cached_tokens: int = 0
    """Of these, those whose KV was found and not computed."""
    scheduling: SchedulingReport | None = None
    """A conductor's."""


class Goodbye(Message, frozen=True, tag="heartbeat.goodbye.v1"):
    """The last heartbeat of a clean stop: nobody needs to wait for it to be missed."""

    worker: WorkerId


Heartbeat = WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat | Goodbye
"""The inbox of `halfmoon.worker.*.heartbeat`."""
