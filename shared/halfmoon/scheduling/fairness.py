"""Who is next among the waiting: classes of service, and tenants within each, by the tokens they were served. Pure.

The virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI'24, arXiv 2401.00588,
algorithm 2), with weights, on two levels. Each counter holds what its owner was served, divided by its weight; the
least is next. Whoever begins to wait is lifted to the least of those that wait, so that idleness saves up nothing. And
as in start-time fair queueing (Goyal et al., SIGCOMM'96), who used what while nobody had to wait is forgotten.

Bound: of two that both wait all the time, counters differ by at most one request's tokens, and those still to be
charged for its owner's requests that run (the paper's lemma 4.3). So nobody starves, and no class does either: between
two turns of one, another is served at most (its weight / the one's) times the one's tokens, plus that bound.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_NAMES = 10_000
"""Counters kept of those that don't wait; of more, they are forgotten: as if new, should they come back."""


class Counters:
    """Tokens served, by name, each divided by the name's weight; kept while anyone waits."""

    def __init__(self, weights: Mapping[str, float], default_weight: float = 1.0) -> None:
        self._weights = weights
        self._default_weight = default_weight
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        """Who waits, and a number for since when."""
        self._entries = itertools.count()
        self._least: list[tuple[float, float, int, str]] = []
        """A heap of (served, negated weight, since when, name). Counters only grow, so what is stale is too small, and
        comes up to be put right."""

    def weight(self, name: str) -> float:
        return self._weights.get(name, self._default_weight)

    def served(self, name: str) -> float:
        return self._served.get(name, 0.0)

    def enter(self, name: str) -> None:
        """It begins to wait."""
        if name in self._waiting:
            return
        first = self.least()
        if first is None:
            self._served.clear()
        else:
            self._served[name] = max(self.served(name), self.served(first))
        self._waiting[name] = since = next(self._entries)
        heapq.heappush(self._least, (self.served(name), -self.weight(name), since, name))

    def leave(self, name: str) -> None:
        """It waits no more. What it is still served counts, should it come back while others wait."""
        self._waiting.pop(name, None)

    def charge(self, name: str, num_tokens: float) -> None:
        """It was served. Of no consequence while nobody waits."""
        if not self._waiting:
            return
        self._served[name] = self.served(name) + num_tokens / self.weight(name)
        if len(self._served) > len(self._waiting) + MAX_NAMES:
            self._served = {name: self._served[name] for name in self._waiting if name in self._served}

    def least(self) -> str | None:
        """Who waits and was served least; of several, the one of most weight, then the first that came."""
        while self._least:
            served, negated_weight, since, name = self._least[0]
            if self._waiting.get(name) != since:
                heapq.heappop(self._least)
            elif served != self.served(name):
                heapq.heapreplace(self._least, (self.served(name), negated_weight, since, name))
            else:
                return name
        return None

    def waiting(self) -> Iterator[str]:
        return iter(self._waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """On whose account a request is served."""

    service_class: str
    tenant: str


@dataclass(frozen=True, slots=True, order=True)
class _Rank:
    """Within one tenant: his higher priority first, then first come, first served."""

    negated_priority: int
    arrival: float


@dataclass(frozen=True, slots=True)
class _Entry(Generic[K]):
    item: K
    share: Share
    rank: _Rank
    num_tokens: int


class _Tenants(Generic[K]):
    """One class's waiting requests."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.counters = Counters(weights)
        self.lines: dict[str, list[_Entry[K]]] = {}
        self.num_tokens = 0

    def put(self, entry: _Entry[K]) -> None:
        tenant = entry.share.tenant
        self.counters.enter(tenant)
        insort(self.lines.setdefault(tenant, []), entry, key=lambda each: each.rank)
        self.num_tokens += entry.num_tokens

    def remove(self, entry: _Entry[K]) -> None:
        line = self.lines[entry.share.tenant]
        line.remove(entry)
        self.num_tokens -= entry.num_tokens
        if not line:
            del self.lines[entry.share.tenant]
            self.counters.leave(entry.share.tenant)


class FairQueue(Generic[K]):
    """Waiting items of one resource. `class_weights` names the classes; tenants that `tenant_weights` doesn't name
    have weight 1."""

    def __init__(self, class_weights: Mapping[str, float], tenant_weights: Mapping[str, float] | None = None) -> None:
        self._tenant_weights = tenant_weights or {}
        self._classes = Counters(class_weights)
        self._tenants: dict[str, _Tenants[K]] = {}
        self._entries: dict[K, _Entry[K]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: K) -> bool:
        return item in self._entries

    def put(self, item: K, share: Share, *, num_tokens: int, arrival: float, priority: int = 0) -> None:
        """Begin to wait. `num_tokens` are charged when it is popped; `arrival` (a time, or a number) orders a tenant's
        own. Raises ValueError for one that waits already."""
        if item in self._entries:
            raise ValueError(f"{item!r} waits already")
        entry = _Entry(item, share, _Rank(-priority, arrival), num_tokens)
        self._entries[item] = entry
        self._classes.enter(share.service_class)
        tenants = self._tenants.get(share.service_class)
        if tenants is None:
            tenants = self._tenants[share.service_class] = _Tenants(self._tenant_weights)
        tenants.put(entry)

    def peek(self) -> K | None:
        """Whose turn it is."""
        entry = self._next()
        return entry.item if entry is not None else None

    def pop(self) -> K | None:
        """The same, which is served now: its prompt is charged."""
        entry = self._next()
        if entry is None:
            return None
        # Charged before it leaves: the last one to leave would be forgotten, and the class with it.
        self.charge(entry.share, entry.num_tokens)
        self._remove(entry)
        return entry.item

    def num_tokens(self, item: K) -> int:
        return self._entries[item].num_tokens

    def remove(self, item: K) -> bool:
        """It waits no more, unserved. False: it did not wait."""
        entry = self._entries.get(item)
        if entry is not None:
            self._remove(entry)
        return entry is not None

    def charge(self, share: Share, num_tokens: float) -> None:
        """What one was served: of an item not put here, or more than its prompt."""
        self._classes.charge(share.service_class, num_tokens)
        tenants = self._tenants.get(share.service_class)
        if tenants is not None:
            tenants.counters.charge(share.tenant, num_tokens)

    def last(self) -> K | None:
        """Whom to turn away where there are too many: of the class with the least weight, of the tenant with the most
        waiting tokens for his weight, the last. So nobody loses a place to one who has more of them."""
        name = min(self._classes.waiting(), key=self._classes.weight, default=None)
        if name is None:
            return None
        tenants = self._tenants[name]
        weight = tenants.counters.weight
        line = max(
            tenants.lines.items(), key=lambda each: sum(entry.num_tokens for entry in each[1]) / weight(each[0])
        )[1]
        return line[-1].item

    def tokens_before(self, item: K) -> float:
        """Prompt tokens that are likely to be served before this one, of those that wait now."""
        entry = self._entries[item]
        tenants = self._tenants[entry.share.service_class]
        own = 0
        for each in tenants.lines[entry.share.tenant]:
            own += each.num_tokens
            if each is entry:
                break
        lines = {tenant: sum(each.num_tokens for each in line) for tenant, line in tenants.lines.items()}
        in_class = _shared(own, entry.share.tenant, lines, tenants.counters)
        classes = {name: tenants.num_tokens for name, tenants in self._tenants.items() if tenants.lines}
        return _shared(in_class, entry.share.service_class, classes, self._classes) - entry.num_tokens

    def waiting(self) -> dict[Share, int]:
        """How many wait, on whose account."""
        return {
            Share(service_class=name, tenant=tenant): len(line)
            for name, tenants in self._tenants.items()
            for tenant, line in tenants.lines.items()
        }

    def _next(self) -> _Entry[K] | None:
        name = self._classes.least()
        if name is None:
            return None
        tenants = self._tenants[name]
        tenant = tenants.counters.least()
        return tenants.lines[tenant][0] if tenant is not None else None

    def _remove(self, entry: _Entry[K]) -> None:
        del self._entries[entry.item]
        tenants = self._tenants[entry.share.service_class]
        tenants.remove(entry)
        if not tenants.lines:
            self._classes.leave(entry.share.service_class)


def _shared(own: float, name: str, waiting: Mapping[str, int], counters: Counters) -> float:
    """Tokens served until `own` of `name` are: the others get their weight's worth meanwhile, if they have so much,
    and what they are behind."""
    until = counters.served(name) + own / counters.weight(name)
    others = (
        min(tokens, max(0.0, until - counters.served(other)) * counters.weight(other))
        for other, tokens in waiting.items()
        if other != name
    )
    return own + sum(others)
