"""A pool that comes back empty among ten warm ones doesn't draw all work: load view, index and policy of a conductor,
on a clock of the test's own, with workers that compute at a constant speed."""

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.conductor.hot import HotIndex
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.conductor.planning import Planner
from halfmoon.scheduling.contract import Costs
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.scheduling.policies import PolicyName, policy_named
from halfmoon.schemas.chunks import ChunkMeta, ChunkRegistered, NodeCleared
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.members import MemberState, RequestProgress, WorkerHeartbeat
from halfmoon.schemas.splits import PrefillHalf, Role
from halfmoon.schemas.wire import Error
from halfmoon.tracing.metrics import Metrics
from support.conductors import CARD, MODEL, node_beat

NODES = [NodeId(f"node-{number}") for number in range(11)]
COLD = NODES[0]
TENANT = TenantId("default")
BIG = msgspec.structs.replace(CARD, kv_bytes_per_token=46_080, max_model_tokens=8192)
ROOT = Namespace.of(BIG, tenant_salt=TENANT).root()
SPEED = 2_000.0
"""Prompt tokens a second, of each worker."""
RATE = 15.0
"""Requests a second: what the workers could do without any cache."""
NEW_SHARE = 0.1
"""Of requests that begin a conversation."""
NUM_CONVERSATIONS, SHARED_TOKENS, NEW_TOKENS = 40, 1024, 100
BEAT_S = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    request: RequestId
    done_s: float
    keys: list[ChunkKey]


@dataclass(slots=True)
class Worker:
    """Computes one prompt after the other."""

    node: NodeId
    jobs: deque[Job] = field(default_factory=deque)

    @property
    def worker(self) -> WorkerId:
        return WorkerId(f"prefill {self.node}")

    def take(self, request: RequestId, num_tokens: int, keys: list[ChunkKey], now_s: float) -> None:
        begins_s = max(now_s, self.jobs[-1].done_s) if self.jobs else now_s
        self.jobs.append(Job(request, begins_s + num_tokens / SPEED, keys))

    def beat(self, now_s: float) -> WorkerHeartbeat:
        left_s = max(0.0, self.jobs[-1].done_s - now_s) if self.jobs else 0.0
        return WorkerHeartbeat(
            worker=self.worker,
            role=Role.PREFILL,
            node=self.node,
            started_ns=1,
            state=MemberState.SERVING,
            card=BIG,
            num_running=min(1, len(self.jobs)),
            num_waiting=max(0, len(self.jobs) - 1),
            queued_tokens=int(left_s * SPEED),
            free_tokens=10**6,
            total_tokens=10**6,
            max_requests=64,
            prefill_tokens_per_s=SPEED,
            requests=tuple(RequestProgress(request_id=job.request, num_tokens=0, new_tokens=()) for job in self.jobs),
        )


class Simulated:
    """One conductor, eleven nodes with a prefill worker each, and a decode worker on a node of its own."""

    def __init__(self, policy: PolicyName) -> None:
        self.members, self.index = Members(), ChunkIndex()
        self.planner = Planner(
            policy_named(policy), Costs(), self.members, lambda: self.index, HotIndex(), {}, Instruments(Metrics())
        )
        self.random = random.Random(11)
        self.now_s, self.next_beat_s = 0.0, 0.0
        self.epochs = dict.fromkeys(NODES, 1)
        self.workers = {node: Worker(node) for node in NODES}
        self.by_worker = {worker.worker: worker for worker in self.workers.values()}
        self.conversations = [self.tokens(SHARED_TOKENS) for _ in range(NUM_CONVERSATIONS)]
        self.num_requests = 0
        for tokens in self.conversations:
            for node in self.random.sample(NODES, 2):
                self.register(node, chunk_keys(ROOT, tokens, BIG.chunk_tokens))

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(BIG.vocab_size), k=count))

    def register(self, node: NodeId, keys: list[ChunkKey]) -> None:
        metas = tuple(
            ChunkMeta(
                key=key,
                index=index,
                num_tokens=BIG.chunk_tokens,
                num_bytes=1,
                checksum=b"",
                request_id=RequestId("r"),
                created_ns=1,
                parent=keys[index - 1] if index else None,
            )
            for index, key in enumerate(keys)
        )
        self.index.apply(ChunkRegistered(node=node, epoch=self.epochs[node], chunks=metas))

    def restart(self, node: NodeId) -> None:
        """Its pool is empty; its worker has nothing to do."""
        self.epochs[node] += 1
        self.workers[node].jobs.clear()
        self.index.apply(NodeCleared(node=node, epoch=self.epochs[node]))
        self.beat()

    def beat(self) -> None:
        for node, worker in self.workers.items():
            self.members.hear(node_beat(node, self.epochs[node]), self.now_s)
            self.members.hear(worker.beat(self.now_s), self.now_s)
        self.members.hear(node_beat("node-d", 1), self.now_s)
        decode = msgspec.structs.replace(
            Worker(NodeId("node-d")).beat(self.now_s), worker=WorkerId("decode"), role=Role.DECODE, max_requests=10**6
        )
        self.members.hear(decode, self.now_s)
        self.next_beat_s = self.now_s + BEAT_S

    def request(self) -> NodeId:
        """One more arrives; the node whose worker gets its prompt."""
        self.now_s += self.random.expovariate(RATE)
        for node, worker in self.workers.items():
            while worker.jobs and worker.jobs[0].done_s <= self.now_s:
                self.register(node, worker.jobs.popleft().keys)
        if self.now_s >= self.next_beat_s:
            self.beat()
        self.num_requests += 1
        name = RequestId(f"req-{self.num_requests}")
        if self.random.random() < NEW_SHARE:
            self.conversations[self.random.randrange(NUM_CONVERSATIONS)] = self.tokens(SHARED_TOKENS)
        tokens = self.random.choice(self.conversations) + self.tokens(NEW_TOKENS)
        decision = self.planner.decide(name, MODEL, TENANT, tokens, 16)
        assert not isinstance(decision, Error)
        choice = decision.plan.prefills[0]
        half = PrefillHalf(
            request_id=name,
            transfer_id=TransferId(name),
            conductor=WorkerId("c"),
            model=MODEL,
            tenant=TENANT,
            root=decision.root,
            tokens=tokens,
            reuse=((),) * choice.num_reused,
            decode_worker=WorkerId("decode"),
        )
        self.members.sent_prefill(choice.worker.worker, half, self.now_s)
        num_new = len(tokens) - choice.num_reused * BIG.chunk_tokens
        self.by_worker[choice.worker.worker].take(name, num_new, list(decision.keys), self.now_s)
        return choice.worker.node


@pytest.mark.parametrize("policy", PolicyName)
def test_an_empty_node_gets_work_but_at_most_twice_its_share(policy: PolicyName) -> None:
    simulated = Simulated(policy)
    simulated.beat()
    for _ in range(110):
        simulated.request()
    simulated.restart(COLD)
    chosen = [simulated.request() for _ in range(220)]
    assert 1 <= chosen.count(COLD) <= 2 * len(chosen) / len(NODES)
    # While the others are at work and this one is idle: where a naive choice goes wrong.
    assert chosen[:22].count(COLD) <= 2 * 22 / len(NODES) + 1
