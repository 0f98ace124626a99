"""What a scheduler is asked, and what it answers. Policies return plans and never execute them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.estimates import Assumed, Estimates
from halfmoon.scheduling.index import Match
from halfmoon.scheduling.prefix import CachedPrefix
from halfmoon.schemas.ids import NodeId, RequestId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a decision is weighed with."""

    estimates: Estimates = field(default_factory=Assumed)
    max_waiting_per_worker: int = 64
    """A worker with so many in its queue gets no more."""
    retry_after_s: float = 1.0
    num_choices: int = 4
    """Workers that a plan names for each half: nobody asks more than a few."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs."""

    request_id: RequestId
    num_tokens: int
    """Of the prompt."""
    max_tokens: int | None
    has_chunks: bool
    """Whether prefill has anything to do for it. A prompt of one token leaves all to decode."""
    match: Match = Match()
    hot: Mapping[WorkerId, int] = msgspec.field(default_factory=dict)
    """Leading chunks of the prompt that workers' engines hold in their own caches; who isn't named has none."""

    def num_hot(self, worker: WorkerId) -> int:
        return self.hot.get(worker, 0)


class Candidates(msgspec.Struct, frozen=True):
    """Workers that can serve one request together: all have the same KV. Neither list is ever empty, but `prefills`
    where no prefill is needed, or only colocated workers are there."""

    card: ModelCard
    prefills: tuple[WorkerLoad, ...]
    decodes: tuple[WorkerLoad, ...]
    """Decode and colocated workers."""


class PrefillChoice(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerLoad
    num_reused: int
    """Chunks that it is to take from the pool; the rest is cheaper to compute, or nowhere."""
    num_pulled: int = 0
    """Of these, how many come from other nodes."""
    num_hot: int = 0
    """Leading chunks that its engine holds: not computed, whatever the pools have."""
    cost_s: float = 0.0
    """Estimated time until the prompt's KV is there: queue, pull and compute."""


class DecodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerLoad
    cost_s: float = 0.0
    """What the choice was made by; see the policy."""
    ttft_s: float | None = None
    """Predicted time to the first token here, with the plan's first prefill choice; None where a policy doesn't ask."""
    tbt_s: float | None = None
    """Predicted seconds between tokens with this request in the batch; None where a policy doesn't ask."""
    num_hot: int = 0
    """Leading chunks that its engine holds: not pulled."""
    is_alone: bool = False
    """It holds every whole chunk of the prompt, and computes the rest sooner than prefill would provide it."""

    @property
    def is_colocated(self) -> bool:
        return self.worker.role is Role.COLOCATED

    @property
    def needs_prefill(self) -> bool:
        return not self.is_colocated and not self.is_alone


@dataclass(frozen=True, slots=True)
class Replication:
    """A copy worth making, besides serving the request: the prompt's leading chunks, on one more node."""

    source: NodeId
    destination: NodeId
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to ask, best first; `Costs.num_choices` of each at most. Nothing has been asked yet."""

    card: ModelCard
    prefills: tuple[PrefillChoice, ...]
    decodes: tuple[DecodeChoice, ...]
    reason: str
    """Why the first of each is the first, for a trace."""
    replication: Replication | None = None
    prefix: CachedPrefix | None = field(default=None, compare=False)
    """The match as the policy priced it, if it did: to name its sources without pricing them once more."""


class Policy(Protocol):
    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        """The best of the candidates, in order. `turn` numbers the decisions of this conductor."""
