"""A simulated instance that does both: steps that decode and compute a piece of a prompt (chunked prefill).

As Sarathi (arXiv:2403.02310) and vLLM do it: a step has a budget of tokens; whoever decodes takes one each, and the
prompts that wait, first come first served, the rest. What a prompt shares with the instance's own pool isn't computed.
"""

from collections import deque
from dataclasses import dataclass

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.estimates import token_pairs
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.sim.cache import NodeCache
from halfmoon.sim.clock import Clock
from halfmoon.sim.decode import DecodeInstance, Listener
from halfmoon.sim.profiles.machine import Machine
from halfmoon.sim.request import SimRequest
from halfmoon.sim.tally import Tally


@dataclass(slots=True, eq=False)
class _Prompt:
    request: SimRequest
    computed: int
    """Tokens from the first on that have their KV."""


class ColocatedInstance(DecodeInstance):
    role = Role.COLOCATED

    def __init__(
        self,
        worker: WorkerId,
        node: NodeId,
        machine: Machine,
        card: ModelCard,
        cache: NodeCache,
        clock: Clock,
        tally: Tally,
        listener: Listener,
        *,
        max_batch: int,
        step_tokens: int,
    ) -> None:
        """`step_tokens`: of a step, those that are decoded included."""
        super().__init__(worker, node, machine, card, clock, tally, listener, max_batch=max_batch)
        self._cache = cache
        self._step_tokens = step_tokens
        self._prompts: deque[_Prompt] = deque()
        self._pieces: list[tuple[_Prompt, int]] = []
        """What the step under way computes."""
        self._whole: list[SimRequest] = []
        """Prompts that the step just past completed."""
        self._queued_tokens = 0
        self._queued_pairs = 0.0

    @property
    def load(self) -> WorkerLoad:
        load = super().load
        return WorkerLoad(
            worker=load.worker,
            role=load.role,
            node=load.node,
            card=load.card,
            num_requests=load.num_requests + len(self._prompts),
            num_waiting=load.num_waiting + len(self._prompts),
            max_requests=load.max_requests,
            queued_tokens=self._queued_tokens,
            queued_pairs=self._queued_pairs,
            context_tokens=load.context_tokens,
            free_tokens=load.free_tokens,
            total_tokens=load.total_tokens,
            prefill_tokens_per_s=self._timing.tokens_per_s,
            decode_step_s=load.decode_step_s,
        )

    @property
    def backlog_s(self) -> float:
        return self._queued_tokens * self._timing.token_s + self._queued_pairs * self._timing.pair_s

    def expect(self, request: SimRequest) -> None:
        """Both halves: it has room as soon as there is, and is computed then."""
        request.kv_at_s = self._clock.now_s
        super().expect(request)

    def _join(self, request: SimRequest) -> None:
        """It has room: its prompt waits to be computed."""
        request.num_reused = self._cache.num_leading(request.keys)
        reused = min(request.num_reused * self._card.chunk_tokens, request.num_tokens - 1)
        self._cache.pin(request.keys[: request.num_reused])
        request.prefill_s = self._timing.prefill_s(request.num_tokens, reused)
        self._prompts.append(_Prompt(request, reused))
        self._queued_tokens += request.num_tokens - reused
        self._queued_pairs += token_pairs(request.num_tokens, reused)
        if self._stretch_steps == 0:
            self._next()
        elif self._stretch_steps > 1:
            steps = self._batch.steps_until(self._clock.now_s - self._stretch_begin_s)
            if steps < self._stretch_steps:
                self._schedule(steps, self._batch.duration_s(steps))

    def _next(self) -> None:
        if not self._prompts:
            super()._next()
            return
        left = max(1, self._step_tokens - len(self._batch))
        self._pieces = []
        pairs = 0.0
        read_tokens = 0
        for prompt in self._prompts:
            piece = min(left, prompt.request.num_tokens - prompt.computed)
            self._pieces.append((prompt, piece))
            pairs += token_pairs(prompt.computed + piece, prompt.computed)
            read_tokens += prompt.computed + piece
            left -= piece
            if left == 0:
                break
        num_new = sum(piece for _, piece in self._pieces)
        duration_s = self._timing.mixed_s(len(self._batch), self._batch.context_tokens, num_new, pairs, read_tokens)
        self._stretch_begin_s = self._clock.now_s
        self._schedule(1, duration_s)

    def _end(self, turn: int) -> None:
        if turn == self._turn and self._pieces:
            self._computed(self._pieces)
            self._pieces = []
        super()._end(turn)

    def _computed(self, pieces: list[tuple[_Prompt, int]]) -> None:
        """Prompts got on by these pieces. One that is whole has its first token, and decodes from the next step on."""
        now_s = self._clock.now_s
        for prompt, piece in pieces:
            self._queued_pairs -= token_pairs(prompt.computed + piece, prompt.computed)
            self._queued_tokens -= piece
            prompt.computed += piece
            request = prompt.request
            if prompt.computed < request.num_tokens:
                continue
            self._prompts.popleft()
            request.prefill_end_s = request.first_token_s = now_s
            self._listener.began(request)
            self._cache.unpin(request.keys[: request.num_reused])
            self._cache.store(request.keys, now_s)
            self._tally.computed(request, self._card.chunk_tokens)
            self._whole.append(request)

    def _finish(self, done: list[SimRequest]) -> None:
        for request in self._whole:
            self._with_room.remove(request)
            self._coming_tokens -= request.num_tokens
            if request.num_completion > 1:
                self._batch.join(request, request.num_tokens + 1, request.num_completion - 1)
            else:
                done.append(request)
        self._whole = []
        super()._finish(done)
