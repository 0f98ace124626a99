"""What a scheduler decides on: the workers and pools that are there, and how busy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from halfmoon.schemas.ids import ModelName, NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def limit_tokens(self) -> int:
        """Prompt and completion together, at most, of one request here."""
        most = self.card.max_model_tokens
        return min(most, self.total_tokens) if self.total_tokens else most

    @property
    def occupancy(self) -> float:
        """Share of its batch in use; above 1 where some wait."""
        return self.num_requests / max(1, self.max_requests)

    @property
    def used(self) -> float:
        """Share of its KV in use; 0 where it isn't known how much it has."""
        return 1 - self.free_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def fullness(self) -> float:
        """Both in sum."""
        return self.occupancy + self.used

    @property
    def column(self) -> tuple[float, ...]:
        """What a `Table` has of it."""
        return (
            self.num_requests,
            self.queued_tokens,
            self.queued_pairs,
            self.context_tokens,
            self.fullness,
        )


class Table(NamedTuple):
    """Of some workers, in their order, float64: what is reckoned for all of them is one operation."""

    num_requests: npt.NDArray[np.float64]
    queued_tokens: npt.NDArray[np.float64]
    queued_pairs: npt.NDArray[np.float64]
    context_tokens: npt.NDArray[np.float64]
    fullness: npt.NDArray[np.float64]


class Roster:
    """Who some workers are, and where: what stays while their load changes."""

    def __init__(self, workers: Iterable[WorkerLoad]) -> None:
        self.places: dict[WorkerId, int] = {}
        self.on: dict[NodeId, list[int]] = {}
        self.colocated: list[int] = []
        for place, worker in enumerate(workers):
            self.places[worker.worker] = place
            self.on.setdefault(worker.node, []).append(place)
            if worker.role is Role.COLOCATED:
                self.colocated.append(place)

    def near(self, nodes: Iterable[NodeId], workers: Iterable[WorkerId]) -> list[int]:
        """Places of those that are on one of the nodes, or named."""
        places = [place for node in nodes for place in self.on.get(node, ())]
        return places + [self.places[worker] for worker in workers if worker in self.places]


class Workers(tuple[WorkerLoad, ...]):
    """Workers that do the same. From one decision to the next, few of them change: the rest isn't looked at again."""

    @classmethod
    def of(cls, workers: Sequence[WorkerLoad]) -> "Workers":
        return workers if isinstance(workers, cls) else cls(workers)

    def updated(self, loads: Iterable[WorkerLoad]) -> "Workers":
        """With these in the places of the same workers' former ones. Those of others are ignored."""
        places = self.roster.places
        changed = [(places[load.worker], load) for load in loads if load.worker in places]
        if not changed:
            return self
        workers, rows = list(self), self._rows.copy()
        is_limit_same = is_line_known = True
        longest_line = self.longest_line
        for place, load in changed:
            before = workers[place]
            is_limit_same = is_limit_same and load.limit_tokens == before.limit_tokens
            is_line_known = is_line_known and (load.num_waiting >= longest_line or before.num_waiting < longest_line)
            longest_line = max(longest_line, load.num_waiting)
            workers[place] = load
            rows[:, place] = load.column
        new = Workers(workers)
        vars(new).update(roster=self.roster, _rows=rows, table=Table(*rows))
        if is_limit_same:
            vars(new).update(least_limit_tokens=self.least_limit_tokens)
        if is_line_known:
            vars(new).update(longest_line=longest_line)
        return new

    def reloaded(self, loads: Sequence[WorkerLoad]) -> "Workers":
        """All of these. Where they are the same workers, who they are isn't worked out again."""
        new = Workers(loads)
        if len(loads) == len(self) and all(map(_is_same, self, loads)):
            vars(new).update(roster=self.roster)
        return new

    @cached_property
    def roster(self) -> Roster:
        return Roster(self)

    @cached_property
    def table(self) -> Table:
        return Table(*self._rows)

    @property
    def queued(self) -> npt.NDArray[np.float64]:
        """The table's first three rows: what a worker computes before it begins with another prompt."""
        return self._rows[:3]

    @cached_property
    def longest_line(self) -> int:
        """The most requests that wait at one of them. There is at least one."""
        return max(worker.num_waiting for worker in self)

    @cached_property
    def least_limit_tokens(self) -> int:
        """What fits into each of them. There is at least one."""
        return min(worker.limit_tokens for worker in self)

    @cached_property
    def _rows(self) -> npt.NDArray[np.float64]:
        """One for each field of `Table`, one column for each worker."""
        columns = [worker.column for worker in self]
        return np.array(columns, np.float64).reshape(-1, len(Table._fields)).T.copy()


def _is_same(before: WorkerLoad, load: WorkerLoad) -> bool:
    return before.worker == load.worker and before.node == load.node and before.role is load.role


class Group(msgspec.Struct, frozen=True):
    """Workers that have the same KV, and so can work together."""

    card: ModelCard
    prefills: Workers
    takers: Workers
    """Decode and colocated ones."""

    def updated(self, loads: Sequence[WorkerLoad]) -> "Group":
        return Group(self.card, self.prefills.updated(loads), self.takers.updated(loads))


def grouped(workers: Iterable[WorkerLoad]) -> tuple[Group, ...]:
    sides: dict[tuple[str | int, ...], tuple[ModelCard, list[WorkerLoad], list[WorkerLoad]]] = {}
    for worker in workers:
        card = worker.card
        _, prefills, takers = sides.setdefault((card.name, *card.kv_identity), (card, [], []))
        (prefills if worker.role is Role.PREFILL else takers).append(worker)
    return tuple(Group(card, Workers(prefills), Workers(takers)) for card, prefills, takers in sides.values())


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
