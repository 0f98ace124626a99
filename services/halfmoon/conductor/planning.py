"""From a prompt and the state of the cluster to a plan: keys, match, admission, ranking. No I/O."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.conductor.copies import Copies
from halfmoon.conductor.hot import HotIndex
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.scheduling.admission import admit
from halfmoon.scheduling.cluster import Cluster
from halfmoon.scheduling.contract import Ask, Costs, Plan, Policy, PrefillChoice
from halfmoon.scheduling.estimates import Assumed, Estimates
from halfmoon.scheduling.index import ChunkIndex
from halfmoon.scheduling.prefix import CachedPrefix
from halfmoon.schemas.ids import ChunkKey, ModelName, RequestId, TenantId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.wire import Error

MAX_ROOTS = 4_096
"""Kept, of tenants and models; then they are worked out anew."""


class Decision(msgspec.Struct, frozen=True):
    """A plan, and what it was made from."""

    plan: Plan
    cluster: Cluster
    ask: Ask
    root: bytes
    keys: tuple[ChunkKey, ...] = ()
    """Of the prompt's whole chunks."""
    estimates: Estimates = msgspec.field(default_factory=Assumed)

    @property
    def card(self) -> ModelCard:
        return self.plan.card

    def with_plan(self, plan: Plan) -> "Decision":
        return self if plan is self.plan else msgspec.structs.replace(self, plan=plan)

    def sources(self, choice: PrefillChoice) -> tuple[tuple[ChunkSource, ...], ...]:
        """For each chunk that the choice reuses, where it is, best first."""
        prefix = self.plan.prefix
        if prefix is None:
            chunk_bytes = self.card.payload_bytes(self.card.chunk_tokens)
            prefix = CachedPrefix(self.ask.match, chunk_bytes, self.estimates, self.ask.request_id)
        return prefix.sources(choice.num_reused, choice.worker.node, self.cluster.nodes)

    def hits(self) -> Counter[str]:
        """Chunks by where the first choice is to find them: `hbm` (hot in its engine), the memory of its node's pool
        (`local`), its `ssd`, or `remote` pools."""
        decode = self.plan.decodes[0]
        if decode.needs_prefill and self.plan.prefills:
            choice = self.plan.prefills[0]
            node, num_hot, num_reused = choice.worker.node, choice.num_hot, choice.num_reused
        elif decode.is_colocated:
            node, num_hot, num_reused = decode.worker.node, decode.num_hot, len(self.ask.match)
        else:
            return Counter(hbm=decode.num_hot)
        match = self.ask.match
        pooled = ["local" if node in nodes else "remote" for nodes in match.holders[num_hot:num_reused]]
        for place, nodes in enumerate(match.on_ssd[num_hot:num_reused]):
            if node in nodes:
                pooled[place] = "ssd"
        return Counter(["hbm"] * num_hot + pooled)


class Planner:
    """Decides for one conductor."""

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        members: Members,
        index: Callable[[], ChunkIndex],
        hot: HotIndex,
        tenant_salts: Mapping[str, str],
        instruments: Instruments,
        copies: Copies | None = None,
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._unlimited = replace(costs, max_waiting_per_worker=sys.maxsize)
        self._members = members
        self._index = index
        self._hot = hot
        self._tenant_salts = tenant_salts
        self._instruments = instruments
        self._copies = copies
        self._turn = 0
        self._roots: dict[tuple[str | int, ...], bytes] = {}

    def decide(
        self,
        request_id: RequestId,
        model: ModelName,
        tenant: TenantId,
        tokens: tuple[int, ...],
        max_tokens: int | None,
        *,
        is_admitted: bool = False,
    ) -> Decision | Error:
        """Whom to ask for both halves; or why nobody can be asked. `is_admitted`: it was placed before, and waits for
        no room in the workers' lines any more."""
        started_s = time.perf_counter()
        cluster = self._members.cluster()
        card = next((worker.card for worker in cluster.workers if worker.card.name == model), None)
        ask = Ask(
            request_id=request_id,
            num_tokens=len(tokens),
            max_tokens=max_tokens,
            has_chunks=card is not None and has_chunks(len(tokens), card),
        )
        candidates = admit(model, ask, cluster, self._unlimited if is_admitted else self._costs)
        if isinstance(candidates, Error):
            return candidates
        root = self.root(candidates.card, tenant)
        keys = chunk_keys(root, tokens, candidates.card.chunk_tokens)
        ask = msgspec.structs.replace(ask, match=self._index().match(keys, cluster.nodes), hot=self._hot.leading(keys))
        plan = self._policy.rank(ask, candidates, self._costs, self._turn)
        self._turn += 1
        self._instruments.decision.observe(time.perf_counter() - started_s)
        return Decision(plan, cluster, ask, root, tuple(keys), self._costs.estimates)

    def carry_out(self, decision: Decision) -> None:
        """What is now being placed by it is counted, and may be a reason for copies."""
        self._instruments.forecasts.num_prompt_chunks += len(decision.keys)
        self._instruments.forecasts.num_matched_chunks += len(decision.ask.match)
        self._instruments.matched_chunks.inc(len(decision.ask.match))
        self._instruments.prompt_chunks.inc(len(decision.keys))
        self._instruments.planned(decision.hits())
        if self._copies is not None:
            self._copies.placed(decision.keys, decision.ask.match, decision.plan)

    def root(self, card: ModelCard, tenant: TenantId) -> bytes:
        """Root of the chunk keys: tenants share KV only where they share a salt."""
        of = (*card.kv_identity, tenant)
        root = self._roots.get(of)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[of] = Namespace.of(card, tenant_salt=self._tenant_salts.get(tenant, tenant)).root()
        return root


def has_chunks(num_tokens: int, card: ModelCard) -> bool:
    """Whether prefill provides anything for a prompt of this length: see `plan_chunks`."""
    return num_tokens >= card.chunk_tokens or num_tokens % card.chunk_tokens > 1
