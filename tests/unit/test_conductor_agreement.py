"""Two conductors see what one would: heartbeats, halves and ends reach both, some milliseconds later."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from halfmoon.conductor.members import Members
from halfmoon.scheduling.admission import admit
from halfmoon.scheduling.contract import Ask, Candidates, Costs
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.scheduling.policies import PolicyName, policy_named
from halfmoon.schemas.ids import NodeId, RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S, MemberState, RequestProgress, WorkerHeartbeat
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, Role
from support.conductors import CARD, MODEL

NUM_WORKERS = 8
TOKENS_PER_S = 200.0
"""A prompt of 120 tokens takes 0.6 s, as one of some thousands does on a GPU."""
STEP_S = 0.01
NUM_REQUESTS = 1_000
DELAY_S = 0.002
"""On average, from one process to another: several times what a broker takes."""
USE = 0.8
"""Of the prefill workers' time."""


@dataclass
class _Prefill:
    """Computes one prompt after the other."""

    free_s: float = 0.0
    queue: dict[RequestId, tuple[float, int]] = field(default_factory=dict)
    """When each will be done, and its tokens."""

    def take(self, request_id: RequestId, num_tokens: int, now_s: float) -> float:
        self.free_s = max(self.free_s, now_s) + num_tokens / TOKENS_PER_S
        self.queue[request_id] = (self.free_s, num_tokens)
        return self.free_s

    def left(self, now_s: float) -> int:
        """Tokens that wait to be computed."""
        self.queue = {name: each for name, each in self.queue.items() if each[0] > now_s}
        return sum(
            min(num_tokens, round((done_s - now_s) * TOKENS_PER_S)) if place == 0 else num_tokens
            for place, (done_s, num_tokens) in enumerate(self.queue.values())
        )


class _World:
    """Workers, and as many conductors as are wanted; requests go to them by turns."""

    def __init__(self, num_conductors: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], object]]] = []
        self._numbers = itertools.count()
        self.conductors = [Members() for _ in range(num_conductors)]
        self._policy = policy_named(PolicyName.KV_CENTRIC)
        self._prefills = [_Prefill() for _ in range(NUM_WORKERS)]
        self._decoding: list[set[RequestId]] = [set() for _ in range(NUM_WORKERS)]
        self.ttfts_s: list[float] = []

    def at(self, when_s: float, what: Callable[[float], object]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def run(self) -> None:
        for at in range(NUM_WORKERS):
            for role in (Role.PREFILL, Role.DECODE):
                self.at(self._draw.uniform(0, HEARTBEAT_INTERVAL_S), partial(self._beat, at, role))
        rate = USE * NUM_WORKERS * TOKENS_PER_S / 120
        now_s = 0.5
        for number in range(NUM_REQUESTS):
            now_s += self._draw.expovariate(rate)
            num_tokens = self._draw.choice([40, 80, 120, 240])
            self.at(now_s, partial(self._place, number, num_tokens))
        self._end_s = now_s
        while self._events:
            when_s, _, what = heapq.heappop(self._events)
            what(when_s)

    def _tell(self, now_s: float, what: Callable[[Members, float], object], *, but: Members | None = None) -> None:
        for members in self.conductors:
            if members is not but:
                self.at(now_s + self._draw.uniform(0, 2 * DELAY_S), partial(what, members))

    def _beat(self, at: int, role: Role, now_s: float) -> None:
        left = self._prefills[at].left(now_s) if role is Role.PREFILL else 0
        names = self._prefills[at].queue if role is Role.PREFILL else self._decoding[at]
        beat = WorkerHeartbeat(
            worker=WorkerId(f"{role.value}-{at}"),
            role=role,
            node=NodeId(f"node-{at}"),
            started_ns=1,
            state=MemberState.SERVING,
            card=CARD,
            num_running=len(names),
            queued_tokens=left,
            queued_pairs=token_pairs(left, 0),
            free_tokens=50_000,
            total_tokens=50_000,
            max_requests=64,
            prefill_tokens_per_s=TOKENS_PER_S,
            decode_step_s=STEP_S,
            requests=tuple(RequestProgress(request_id=name, num_tokens=1) for name in names),
        )
        self._tell(now_s, lambda members, then_s: members.hear(beat, then_s))
        if now_s < self._end_s:
            self.at(now_s + HEARTBEAT_INTERVAL_S, lambda then_s: self._beat(at, role, then_s))

    def _place(self, number: int, num_tokens: int, now_s: float) -> None:
        mine = self.conductors[number % len(self.conductors)]
        name = RequestId(f"req-{number}")
        asked = Ask(request_id=name, num_tokens=num_tokens, max_tokens=16, has_chunks=True)
        costs = Costs(max_waiting_per_worker=1_000)
        candidates = admit(MODEL, asked, mine.cluster(), costs)
        assert isinstance(candidates, Candidates), candidates
        plan = self._policy.rank(asked, candidates, costs, number)
        prefill, decode = plan.prefills[0].worker, plan.decodes[0].worker
        decode_half = DecodeHalf(
            request_id=name,
            transfer_id=TransferId(name),
            conductor=WorkerId("c"),
            model=MODEL,
            tenant=TenantId("t"),
            root=b"",
            tokens=(1,) * num_tokens,
            sampling=Sampling(max_tokens=16),
            seed=1,
            reply="r",
            prefill_worker=prefill.worker,
        )
        prefill_half = PrefillHalf(
            request_id=name,
            transfer_id=decode_half.transfer_id,
            conductor=decode_half.conductor,
            model=MODEL,
            tenant=decode_half.tenant,
            root=b"",
            tokens=decode_half.tokens,
            reuse=(),
            decode_worker=decode.worker,
        )
        mine.sent_decode(decode.worker, decode_half, now_s)
        mine.sent_prefill(prefill.worker, prefill_half, now_s)
        self._tell(now_s, lambda members, then_s: members.sent_decode(decode.worker, decode_half, then_s), but=mine)
        self._tell(now_s, lambda members, then_s: members.sent_prefill(prefill.worker, prefill_half, then_s), but=mine)
        self.at(
            now_s + DELAY_S, lambda then_s: self._arrive(name, num_tokens, prefill.worker, decode.worker, now_s, then_s)
        )

    def _arrive(
        self, name: RequestId, num_tokens: int, prefill: WorkerId, decode: WorkerId, placed_s: float, now_s: float
    ) -> None:
        done_s = self._prefills[int(prefill.rsplit("-", 1)[1])].take(name, num_tokens, now_s)
        self._decoding[int(decode.rsplit("-", 1)[1])].add(name)
        self.ttfts_s.append(done_s - placed_s)
        self.at(done_s, lambda then_s: self._end(name, prefill, Role.PREFILL, then_s))
        self.at(done_s + 16 * STEP_S, lambda then_s: self._end(name, decode, Role.DECODE, then_s))

    def _end(self, name: RequestId, worker: WorkerId, role: Role, now_s: float) -> None:
        if role is Role.DECODE:
            self._decoding[int(worker.rsplit("-", 1)[1])].discard(name)
        ended = HalfEnded(request_id=name, transfer_id=TransferId(name), worker=worker, role=role)
        self._tell(now_s, lambda members, _: members.half_ended(ended))


def mean_ttft_s(num_conductors: int, seed: int) -> float:
    world = _World(num_conductors, seed)
    world.run()
    assert len(world.ttfts_s) == NUM_REQUESTS
    return sum(world.ttfts_s) / NUM_REQUESTS


@pytest.mark.parametrize("seed", [1, 2])
def test_two_conductors_place_as_well_as_one(seed: int) -> None:
    one, two = mean_ttft_s(1, seed), mean_ttft_s(2, seed)
    assert two <= 1.05 * one
    assert mean_ttft_s(2, seed) == two
