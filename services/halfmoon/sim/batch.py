"""Sequences that are decoded together: each step gives every one of them a token. Pure.

Steps are not events of their own. While the batch stays the same, a step is longer than the one before by what one more
token of context for each sequence costs, so any number of steps is summed up at once:

    t(k steps) = k · (base + slope · context)  +  slope · batch · k (k - 1) / 2
"""

import heapq
import math

from halfmoon.engine.sim.timing import Timing
from halfmoon.sim.request import SimRequest


class Batch:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._steps = 0
        self._ends: list[tuple[int, int, SimRequest]] = []
        """When each has all its tokens, in steps."""
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self._ends)

    def join(self, request: SimRequest, num_context: int, num_left: int) -> None:
        """`num_left` tokens are to come, at least one."""
        heapq.heappush(self._ends, (self._steps + num_left, request.number, request))
        self.context_tokens += num_context

    @property
    def steps_to_end(self) -> int:
        """Until the first of them has all its tokens."""
        return self._ends[0][0] - self._steps

    def duration_s(self, num_steps: int) -> float:
        first, growth = self._first_and_growth()
        return num_steps * first + growth * num_steps * (num_steps - 1) / 2

    def steps_until(self, elapsed_s: float) -> int:
        """The least number of steps that take so long, at least one."""
        first, growth = self._first_and_growth()
        linear = first - growth / 2
        # The root of a quadratic, written so that it also holds where steps don't grow.
        steps = 2 * elapsed_s / (linear + math.sqrt(linear * linear + 2 * growth * elapsed_s))
        return max(1, math.ceil(steps - 1e-9))

    def pass_steps(self, num_steps: int) -> list[SimRequest]:
        """Everyone got so many tokens. Those that have all of theirs, which are in it no more."""
        self._steps += num_steps
        self.context_tokens += num_steps * len(self._ends)
        done = []
        while self._ends and self._ends[0][0] <= self._steps:
            request = heapq.heappop(self._ends)[2]
            self.context_tokens -= request.num_tokens + request.num_completion
            done.append(request)
        return done

    def _first_and_growth(self) -> tuple[float, float]:
        slope = self._timing.step_context_s
        batch = len(self._ends)
        return self._timing.step_base_s(batch) + slope * self.context_tokens, slope * batch
