"""One run: requests arrive, the real policies place them, instances serve them, on a virtual clock.

arrival ─ index, policy, admission ─▶ rejected
                 └─▶ prefill instance ─ KV ─▶ decode instance ─▶ finished, or turned away (wasted)
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from halfmoon.scheduling.admission import admit
from halfmoon.scheduling.cluster import Cluster, Group, Workers
from halfmoon.scheduling.contract import Ask, Costs, Plan
from halfmoon.scheduling.index import ChunkIndex, Match
from halfmoon.scheduling.outlook import Outlook
from halfmoon.scheduling.policies import policy_named
from halfmoon.scheduling.service_class import ServiceClass
from halfmoon.scheduling.slo import Admission, AdmissionName, Breach, first_token_s
from halfmoon.schemas.chunks import ChunkEvent, NodeCleared
from halfmoon.schemas.ids import RequestId, WorkerId
from halfmoon.schemas.wire import Error
from halfmoon.sim.cache import EPOCH
from halfmoon.sim.clock import Clock
from halfmoon.sim.cluster import MODEL, SimCluster
from halfmoon.sim.estimates import Queue, SimEstimates
from halfmoon.sim.load import LoadSample, LoadSeries
from halfmoon.sim.options import SimOptions
from halfmoon.sim.prefill import PrefillInstance
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import Outcome, SimRequest
from halfmoon.sim.shortlist import Shortlist
from halfmoon.sim.tally import Tally

PROGRESS_EVERY = 200


class Simulation:
    """Made for one run. `watch` sees each request when it has ended."""

    def __init__(
        self,
        options: SimOptions,
        machine: Machine,
        chunk_tokens: int,
        watch: Callable[[SimRequest], None] = lambda request: None,
    ) -> None:
        options.check()
        self.options = options
        self.machine = machine
        self.chunk_tokens = chunk_tokens
        self.clock = Clock()
        self.tally = Tally(options.slo)
        self.load = LoadSeries()
        self._watch = watch
        self._lagging: deque[tuple[float, ChunkEvent]] = deque()
        self.cluster = SimCluster(options, machine, chunk_tokens, self.clock, self.tally, self._tell, self)
        cluster = self.cluster
        self.index = ChunkIndex.of((), cluster.nodes)
        queues: dict[WorkerId, Queue] = {**cluster.prefills, **cluster.colocated}
        self._queues = queues
        estimates = SimEstimates(machine.timing, queues, cluster.network, self.clock)
        self._costs = Costs(estimates=estimates, max_waiting_per_worker=options.max_waiting)
        if options.admission is AdmissionName.NONE:
            # Nobody refuses here what it is asked to do, so only admission ever looks at a second choice.
            self._costs = replace(self._costs, num_choices=1)
        self._policy = policy_named(options.policy, balancing_threshold=options.balancing_threshold)
        self._outlook = Outlook()
        self._admission = Admission(options.admission, estimates, self._outlook)
        self._judged = ServiceClass(ttft_s=options.slo.ttft_s, tbt_s=options.slo.tbt_s if options.judges_tbt else None)
        self._prefills = Shortlist(options.policy, options.seed, cluster.prefills.values())
        self._decodes = Shortlist(options.policy, options.seed, cluster.decodes.values())
        self._seen_prefills = self._seen_takers = Workers()
        """As the last decision saw them."""
        self._turn = 0
        self._arrivals: Iterator[SimRequest] = iter(())

    def run(
        self, arrivals: Iterable[SimRequest], progress: Callable[[int, float], None] = lambda done, s: None
    ) -> Tally:
        """Until the last request has ended. `progress`: requests that have arrived, and the virtual time."""
        self._arrivals = iter(arrivals)
        self._await_next()
        for join_s in self.options.joins_s:
            self.clock.at(join_s, self._join)
        self._sample()
        # Nothing here refers to itself in a circle, and looking for circles takes a tenth of the time.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._pass(progress)
        finally:
            if was_enabled:
                gc.enable()
        progress(self.tally.num_requests, self.clock.now_s)
        return self.tally

    def _pass(self, progress: Callable[[int, float], None]) -> None:
        before = 0
        while self.clock.step():
            if self.tally.num_requests >= before + PROGRESS_EVERY:
                before = self.tally.num_requests
                progress(before, self.clock.now_s)

    def _await_next(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self.clock.at(request.at_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        self._await_next()
        self.tally.num_requests += 1
        request.request_id = RequestId(f"{self.options.seed}-{request.request_id}")
        self._hear()
        match = self.index.match(request.keys, self.cluster.nodes)
        ask = Ask(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            max_tokens=request.max_tokens,
            has_chunks=request.num_tokens > 1,
            match=match,
        )
        candidates = admit(MODEL, ask, self._seen(match), self._costs)
        if isinstance(candidates, Error):
            self._reject(request, candidates.code.value)
            return
        plan = self._policy.rank(ask, candidates, self._costs, self._turn)
        self._turn += 1
        judged = self._admission.judge(plan, ask, self._judged, self.clock.now_s)
        if isinstance(judged, Breach):
            self._reject(request, judged.limit.value)
        else:
            self._serve(request, judged, match)

    def _seen(self, match: Match) -> Cluster:
        """The cluster as the policy is to see it: those that are worth weighing, where there are many."""
        cluster = self.cluster
        chosen = self._prefills.of(self._backlogs, match, self._turn)
        if cluster.colocated:
            takers = self._decodes.of(lambda each: _loads(each, "backlog_s"), match, self._turn)
        else:
            takers = self._decodes.of(lambda each: _loads(each, "num_sent"), Match(), self._turn)
        self._seen_prefills = self._seen_prefills.reloaded([each.load for each in chosen])
        self._seen_takers = self._seen_takers.reloaded([each.load for each in takers])
        group = Group(cluster.card, self._seen_prefills, self._seen_takers)
        return Cluster((*group.prefills, *group.takers), cluster.nodes, {}, groups=(group,))

    def _backlogs(self, prefills: Sequence[PrefillInstance]) -> NDArray[np.float64]:
        """`PrefillInstance.backlog_s` of many at once."""
        running_s: NDArray[np.float64] = np.maximum(_loads(prefills, "free_at_s") - self.clock.now_s, 0.0)
        return running_s + _loads(prefills, "waiting_s")

    def _serve(self, request: SimRequest, plan: Plan, match: Match) -> None:
        now_s = self.clock.now_s
        choice = plan.decodes[0]
        decode = self.cluster.decodes[choice.worker.worker]
        begins_s = now_s + first_token_s(plan, choice)
        self._outlook.placed(decode.worker, request.request_id, request.num_tokens, begins_s, now_s)
        decode.expect(request)
        if not choice.needs_prefill:
            return
        if not plan.prefills:
            self.clock.at(now_s + self.machine.request_s, lambda: decode.kv_there(request))
            return
        first = plan.prefills[0]
        prefill = self.cluster.prefills[first.worker.worker]
        request.prefill = prefill.worker
        prefill.submit(request, first, match, decode.node, decode.kv_there)
        if plan.replication is not None:
            copy = plan.replication
            self.cluster.replicate(request, copy.source, copy.destination, copy.num_chunks)

    def _reject(self, request: SimRequest, reason: str) -> None:
        request.outcome, request.reason = Outcome.REJECTED, reason
        self.tally.ended(request, self.clock.now_s)
        self._watch(request)

    def began(self, request: SimRequest) -> None:
        """It has its first token."""
        self._outlook.began(request.request_id, self.clock.now_s)

    def ended(self, request: SimRequest) -> None:
        """It has its last, or was turned away."""
        now_s = self.clock.now_s
        if request.last_token_s is None:
            request.outcome = Outcome.WASTED
            self._outlook.dropped(request.request_id)
        else:
            request.outcome = Outcome.FINISHED
            self._outlook.ended(request.request_id, now_s)
        self.tally.ended(request, now_s)
        self._watch(request)

    def _tell(self, event: ChunkEvent) -> None:
        self._lagging.append((self.clock.now_s + self.options.index_lag_s, event))

    def hear_all(self) -> None:
        """The index takes in what is still on its way."""
        while self._lagging:
            self.index.apply(self._lagging.popleft()[1])

    def _hear(self) -> None:
        """The index takes in what has had its time to come."""
        while self._lagging and self._lagging[0][0] <= self.clock.now_s:
            self.index.apply(self._lagging.popleft()[1])

    def _join(self) -> None:
        instance: PrefillInstance = self.cluster.add_prefill()
        self._queues[instance.worker] = instance
        self._prefills.add(instance)
        self.index.apply(NodeCleared(node=instance.node, epoch=EPOCH))

    def _sample(self) -> None:
        """As long as something is still to happen."""
        backlogs = [each.backlog_s for each in self._queues.values()]
        decodes = self.cluster.decodes.values()
        self.load.add(
            LoadSample(
                at_s=self.clock.now_s,
                prefill_backlog_s=sum(backlogs) / len(backlogs),
                max_prefill_backlog_s=max(backlogs),
                decode_batch=sum(each.batch_size for each in decodes) / len(decodes),
                decode_tbt_s=sum(each.tbt_s for each in decodes) / len(decodes),
                num_rejected=self.tally.num_rejected,
            )
        )
        if len(self.clock):
            self.clock.at(self.clock.now_s + self.load.interval_s, self._sample)


def _loads(instances: Sequence[object], name: str) -> NDArray[np.float64]:
    return np.fromiter(map(attrgetter(name), instances), float, len(instances))
