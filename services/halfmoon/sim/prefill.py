"""A simulated prefill instance: pulls what its pool lacks, computes one prompt after the other, hands KV over.

arrives ─ pulls (beside the queue) ─▶ queue ─▶ computes ─▶ its KV is stored, and at the decode worker a chunk later
                                               └ handover runs meanwhile, layer by layer
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import PrefillChoice
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.scheduling.index import Match
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.sim.cache import NodeCache
from halfmoon.sim.clock import Clock
from halfmoon.sim.network import Network
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import SimRequest
from halfmoon.sim.tally import Tally


@dataclass(slots=True, eq=False)
class _Job:
    request: SimRequest
    destination: NodeId
    handed: Callable[[SimRequest], None]
    pinned: tuple[ChunkKey, ...]
    sources: list[tuple[NodeCache, list[ChunkKey]]] = field(default_factory=list)
    pairs: float = 0.0


class PrefillInstance:
    def __init__(
        self,
        worker: WorkerId,
        node: NodeId,
        machine: Machine,
        card: ModelCard,
        caches: Mapping[NodeId, NodeCache],
        network: Network,
        clock: Clock,
        tally: Tally,
    ) -> None:
        self.worker = worker
        self.node = node
        self.busy_s = 0.0
        self.num_prompts = 0
        self.free_at_s = 0.0
        """When the prompt that runs is done."""
        self.waiting_s = 0.0
        """Of computing those that wait."""
        self._timing = machine.timing
        self._request_s = machine.request_s
        self._card = card
        self._caches = caches
        self._cache = caches[node]
        self._network = network
        self._clock = clock
        self._tally = tally
        self._ready: deque[_Job] = deque()
        self._running: _Job | None = None
        self._waiting_tokens = 0
        self._waiting_pairs = 0.0
        self._num_waiting = 0

    @property
    def backlog_s(self) -> float:
        """Until it would begin with another prompt, if nothing waited for a pull."""
        return max(0.0, self.free_at_s - self._clock.now_s) + self.waiting_s

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def load(self) -> WorkerLoad:
        running = self._running
        left = max(0.0, self.free_at_s - self._clock.now_s) / running.request.prefill_s if running else 0.0
        rest = running.request.num_tokens - running.request.num_reused * self._card.chunk_tokens if running else 0
        return WorkerLoad(
            worker=self.worker,
            role=Role.PREFILL,
            node=self.node,
            card=self._card,
            num_requests=self._num_waiting + (running is not None),
            num_waiting=self._num_waiting,
            queued_tokens=self._waiting_tokens + round(left * rest),
            queued_pairs=self._waiting_pairs + (left * running.pairs if running else 0.0),
            prefill_tokens_per_s=self._timing.tokens_per_s,
        )

    def submit(
        self,
        request: SimRequest,
        choice: PrefillChoice,
        match: Match,
        destination: NodeId,
        handed: Callable[[SimRequest], None],
    ) -> None:
        """Take what the plan says of the pools, as far as it is really there; what isn't is computed.

        `handed` is told when all of the KV has come to the decode worker's node.
        """
        wanted = request.keys[: choice.num_reused]
        job = _Job(request, destination, handed, ())
        by_source: dict[NodeId, list[ChunkKey]] = {}
        there = 0
        for key, holders in zip(wanted, match.holders, strict=False):
            if key not in self._cache:
                source = self._source(key, holders)
                if source is None:
                    self._tally.num_stale += 1
                    break
                by_source.setdefault(source, []).append(key)
            there += 1
        job.pinned = wanted[:there]
        self._cache.pin(job.pinned)
        request.num_reused = there
        reused_tokens = min(there * self._card.chunk_tokens, request.num_tokens)
        request.prefill_s = self._timing.prefill_s(request.num_tokens, reused_tokens)
        job.pairs = token_pairs(request.num_tokens, reused_tokens)
        self._num_waiting += 1
        self.waiting_s += request.prefill_s
        self._waiting_tokens += request.num_tokens - reused_tokens
        self._waiting_pairs += job.pairs
        come_s = self._clock.now_s
        for source, keys in by_source.items():
            cache = self._caches[source]
            cache.pin(keys)
            job.sources.append((cache, keys))
            num_bytes = len(keys) * self._card.chunk_tokens * self._card.kv_bytes_per_token
            self._tally.bytes_pulled += num_bytes
            come_s = max(come_s, self._network.send(source, self.node, num_bytes, self._clock.now_s))
        if by_source:
            self._clock.at(come_s, lambda: self._pulled(job))
        else:
            self._queue(job)

    def _source(self, key: ChunkKey, holders: Iterable[NodeId]) -> NodeId | None:
        """Of those that hold it, the one with the least to send."""
        now_s = self._clock.now_s
        true = [node for node in holders if node in self._caches and key in self._caches[node]]
        return min(true, key=lambda node: (self._network.backlog_s(node, now_s), node), default=None)

    def _pulled(self, job: _Job) -> None:
        for cache, keys in job.sources:
            cache.unpin(keys)
        self._queue(job)

    def _queue(self, job: _Job) -> None:
        self._ready.append(job)
        if self._running is None:
            self._begin()

    def _begin(self) -> None:
        job = self._running = self._ready.popleft()
        request, now_s = job.request, self._clock.now_s
        self._num_waiting -= 1
        self.waiting_s = max(0.0, self.waiting_s - request.prefill_s)
        self._waiting_tokens -= request.num_tokens - min(
            request.num_reused * self._card.chunk_tokens, request.num_tokens
        )
        self._waiting_pairs -= job.pairs
        self.free_at_s = now_s + request.prefill_s
        self.busy_s += request.prefill_s
        self.num_prompts += 1
        num_bytes = request.num_tokens * self._card.kv_bytes_per_token
        handed_s = self._network.send(self.node, job.destination, num_bytes, now_s)
        self._clock.at(self.free_at_s, lambda: self._end(job, handed_s))

    def _end(self, job: _Job, handed_s: float) -> None:
        request, now_s = job.request, self._clock.now_s
        request.prefill_end_s = now_s
        self._cache.unpin(job.pinned)
        self._cache.store(request.keys, now_s)
        self._tally.computed(request, self._card.chunk_tokens)
        if job.destination != self.node:
            self._tally.bytes_handed_over += request.num_tokens * self._card.kv_bytes_per_token
            # The last chunk can't go before it is computed.
            last_bytes = min(request.num_tokens, self._card.chunk_tokens) * self._card.kv_bytes_per_token
            handed_s = max(handed_s, now_s + self._network.through_s(last_bytes))
        self._clock.at(handed_s + self._request_s, lambda: job.handed(request))
        self._running = None
        if self._ready:
            self._begin()
