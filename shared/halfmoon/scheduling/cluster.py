"""What a scheduler decides on: the workers and pools that are there, and how busy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfmoon.schemas.ids import ModelName, NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker, as policies see it: its last heartbeat, and what was sent to it since."""

    worker: WorkerId
    role: Role
    node: NodeId
    card: ModelCard
    num_requests: int = 0
    num_waiting: int = 0
    max_requests: int = 1
    queued_tokens: int = 0
    """Prompt tokens that it still has to compute before it begins with another."""
    queued_pairs: float = 0.0
    """The same work as token pairs (`estimates.token_pairs`), which a prompt's length alone doesn't tell."""
    context_tokens: int = 0
    """Of all that it decodes, in sum: prompts, and completions so far."""
    free_tokens: int = 0
    total_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None

    limit_tokens: int = field(init=False)
    """Prompt and completion together, at most, of one request here."""
    occupancy: float = field(init=False)
    """Share of its batch in use; above 1 where some wait."""
    used: float = field(init=False)
    """Share of its KV in use; 0 where it isn't known how much it has."""
    fullness: float = field(init=False)
    """Both in sum."""

    def __post_init__(self) -> None:
        # Looked at for every worker in every decision: worked out once.
        most = self.card.max_model_tokens
        object.__setattr__(self, "limit_tokens", min(most, self.total_tokens) if self.total_tokens else most)
        object.__setattr__(self, "used", 1 - self.free_tokens / self.total_tokens if self.total_tokens else 0.0)
        object.__setattr__(self, "occupancy", self.num_requests / max(1, self.max_requests))
        object.__setattr__(self, "fullness", self.occupancy + self.used)


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that have the same KV, and so can work together."""

    card: ModelCard
    prefills: tuple[WorkerLoad, ...]
    takers: tuple[WorkerLoad, ...]
    """Decode and colocated ones."""


def grouped(workers: Iterable[WorkerLoad]) -> tuple[Group, ...]:
    sides: dict[tuple[str | int, ...], tuple[ModelCard, list[WorkerLoad], list[WorkerLoad]]] = {}
    for worker in workers:
        card = worker.card
        _, prefills, takers = sides.setdefault((card.name, *card.kv_identity), (card, [], []))
        (prefills if worker.role is Role.PREFILL else takers).append(worker)
    return tuple(Group(card, tuple(prefills), tuple(takers)) for card, prefills, takers in sides.values())


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a policy decides on."""

    workers: tuple[WorkerLoad, ...]
    """Those that take work."""
    nodes: Mapping[NodeId, int]
    """Live pools, with their epochs."""
    models: Mapping[ModelName, ModelCard]
    """Every model that was served at some time, so that `gone for now` and `never heard of` can be told apart."""
    labels: Mapping[NodeId, Mapping[str, str]] = field(default_factory=dict)
    """Where nodes are: zone, rack, switch, nic. Only of those that were labelled."""
    transfers: Mapping[NodeId, int] = field(default_factory=dict)
    """Pulls that each node's pool has under way or waiting, as it last said."""
    groups: tuple[Group, ...] = ()
    """The workers, by what KV they have. Worked out from them where it isn't given."""

    def __post_init__(self) -> None:
        if self.workers and not self.groups:
            object.__setattr__(self, "groups", grouped(self.workers))
