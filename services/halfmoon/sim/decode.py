"""A simulated decode instance: one continuous batch, which sequences join and leave between steps."""

from collections import deque
from typing import Protocol

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.sim.batch import Batch
from halfmoon.sim.clock import Clock
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import SimRequest
from halfmoon.sim.tally import Tally


class Listener(Protocol):
    def began(self, request: SimRequest) -> None:
        """It has its first token."""

    def ended(self, request: SimRequest) -> None:
        """It has its last token, or was turned away."""


class DecodeInstance:
    role = Role.DECODE

    def __init__(
        self,
        worker: WorkerId,
        node: NodeId,
        machine: Machine,
        card: ModelCard,
        clock: Clock,
        tally: Tally,
        listener: Listener,
        *,
        max_batch: int,
        max_tbt_s: float | None = None,
    ) -> None:
        """`max_tbt_s`: what a sequence that comes with its KV must not lengthen steps to, or it is turned away."""
        self.worker = worker
        self.node = node
        self.busy_s = 0.0
        self.num_sent = 0
        """Sequences that are in the batch, or will be."""
        self._timing = machine.timing
        self._card = card
        self._clock = clock
        self._tally = tally
        self._listener = listener
        self._max_batch = max_batch
        self._max_tbt_s = max_tbt_s
        self._total_tokens = machine.kv_tokens
        self._free_tokens = machine.kv_tokens
        self._batch = Batch(machine.timing)
        self._line: deque[SimRequest] = deque()
        """Those that wait for room, in the order of their coming."""
        self._with_room: set[SimRequest] = set()
        self._coming_tokens = 0
        """Prompts that have room and will join: expected, or at the next step."""
        self._joining: list[SimRequest] = []
        self._fresh: list[SimRequest] = []
        """Whose first token the step under way brings."""
        self._stretch_begin_s = 0.0
        self._stretch_steps = 0
        self._stretch_s = 0.0
        self._turn = 0
        """Numbers the stretches, so that the end of one that was cut short isn't taken for its end."""

    @property
    def load(self) -> WorkerLoad:
        """As a conductor counts: whoever was sent here is in it, its KV still to come."""
        return WorkerLoad(
            worker=self.worker,
            role=self.role,
            node=self.node,
            card=self._card,
            num_requests=self.num_sent,
            num_waiting=len(self._line),
            max_requests=self._max_batch,
            context_tokens=self._batch.context_tokens + self._coming_tokens,
            free_tokens=self._free_tokens,
            total_tokens=self._total_tokens,
            decode_step_s=self._step_s(),
        )

    @property
    def batch_size(self) -> int:
        return len(self._batch)

    @property
    def tbt_s(self) -> float:
        """Of the batch as it is."""
        return self._step_s() if len(self._batch) else 0.0

    def expect(self, request: SimRequest) -> None:
        """It will come with its KV: keep room for it, as soon as there is."""
        self.num_sent += 1
        self._line.append(request)
        self._serve_line()

    def kv_there(self, request: SimRequest) -> None:
        request.kv_at_s = self._clock.now_s
        if self._is_too_much(request):
            self._let_go(request)
            request.reason = "decode"
            self._listener.ended(request)
        elif request in self._with_room:
            self._join(request)

    def _is_too_much(self, request: SimRequest) -> bool:
        if self._max_tbt_s is None or not len(self._batch):
            return False
        joining = sum(each.num_tokens for each in self._joining)
        batch = len(self._batch) + len(self._joining) + 1
        context = self._batch.context_tokens + joining + request.num_tokens
        return self._timing.step_s(batch, context) > self._max_tbt_s

    def _serve_line(self) -> None:
        while self._line:
            request = self._line[0]
            busy = len(self._batch) + len(self._with_room)
            if self._needs(request) > self._free_tokens or busy >= self._max_batch:
                return
            self._line.popleft()
            self._free_tokens -= self._needs(request)
            self._with_room.add(request)
            self._coming_tokens += request.num_tokens
            if request.kv_at_s is not None:
                self._join(request)

    def _needs(self, request: SimRequest) -> int:
        return min(request.num_tokens + request.max_tokens, self._total_tokens)

    def _let_go(self, request: SimRequest) -> None:
        self.num_sent -= 1
        if request in self._with_room:
            self._with_room.remove(request)
            self._coming_tokens -= request.num_tokens
            self._free_tokens += self._needs(request)
        else:
            self._line.remove(request)
        self._serve_line()

    def _join(self, request: SimRequest) -> None:
        """At the next step; the stretch of steps under way ends with the one that runs."""
        self._joining.append(request)
        if self._stretch_steps == 0:
            self._next()
        elif self._stretch_steps > 1:
            steps = self._batch.steps_until(self._clock.now_s - self._stretch_begin_s)
            if steps < self._stretch_steps:
                self._schedule(steps, self._batch.duration_s(steps))

    def _next(self) -> None:
        """Begin with another stretch: one step where somebody is new, else until the first has all its tokens."""
        self._take_in()
        if len(self._batch):
            steps = 1 if self._fresh else self._batch.steps_to_end
            self._stretch_begin_s = self._clock.now_s
            self._schedule(steps, self._batch.duration_s(steps))
        else:
            self._stretch_steps = 0

    def _take_in(self) -> None:
        self._fresh = self._joining
        self._joining = []
        for request in self._fresh:
            self._with_room.remove(request)
            self._coming_tokens -= request.num_tokens
            self._batch.join(request, request.num_tokens, request.num_completion)

    def _schedule(self, steps: int, duration_s: float) -> None:
        self._turn += 1
        turn = self._turn
        self._stretch_steps, self._stretch_s = steps, duration_s
        self._clock.at(self._stretch_begin_s + duration_s, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        steps = self._stretch_steps
        self.busy_s += self._stretch_s
        for request in self._fresh:
            request.first_token_s = self._clock.now_s
            self._listener.began(request)
        self._tally.gaps(self._stretch_s / steps, steps * len(self._batch) - len(self._fresh))
        self._fresh = []
        self._finish(self._batch.pass_steps(steps))
        self._next()

    def _finish(self, done: list[SimRequest]) -> None:
        for request in done:
            request.last_token_s = self._clock.now_s
            self.num_sent -= 1
            self._free_tokens += self._needs(request)
            self._listener.ended(request)
        if done:
            self._stretch_steps = -1  # Whoever has room now joins below, not by cutting what is over.
            self._serve_line()

    def _step_s(self) -> float:
        return self._timing.step_s(max(1, len(self._batch)), self._batch.context_tokens)
