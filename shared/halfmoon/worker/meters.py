"""What a worker measures of its own work, for the cost models of those who place requests."""

from collections import deque

from halfmoon.schemas.measurements import DecodeSample, PrefillSample

MAX_SAMPLES = 16
"""Per heartbeat: what a worker computes between two of them is hardly more, and never tells more."""


class PrefillMeter:
    """Times prompts, each without the time that the engine gave to those before it.

    Engines compute prompts first come, first served; so one that began while another was computed has its own time from
    the other's end on:

        one    ├────────────┤
        other      ├┄┄┄┄┄┄┄┄├──────┤
    """

    def __init__(self) -> None:
        self._free_s = 0.0
        """When the engine was done with the last prompt."""
        self._samples: deque[PrefillSample] = deque(maxlen=MAX_SAMPLES)

    def computed(self, began_s: float, now_s: float, *, num_tokens: int, num_computed: int) -> None:
        """A prompt that was worked on since `began_s`: finished, or given up with so many tokens computed."""
        duration_s = now_s - max(began_s, self._free_s)
        self._free_s = now_s
        if num_computed > 0 and duration_s > 0:
            self._samples.append(
                PrefillSample(num_tokens=num_tokens, num_reused=num_tokens - num_computed, duration_s=duration_s)
            )

    def take(self) -> tuple[PrefillSample, ...]:
        """Those since the last call."""
        taken = tuple(self._samples)
        self._samples.clear()
        return taken


class DecodeMeter:
    """Times the gaps between tokens, of all requests together."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._num_gaps = 0
        self._gaps_s = 0.0

    def gap(self, seconds: float) -> None:
        """Between two tokens of one request."""
        self._num_gaps += 1
        self._gaps_s += seconds

    def take(self, now_s: float, context_tokens: int) -> tuple[DecodeSample, ...]:
        """The mean since the last call; nothing where nothing was decoded. By Little's law, the requests decoded
        together are the sum of all gaps over the time that they fell in."""
        passed_s, num_gaps, gaps_s = now_s - self._since_s, self._num_gaps, self._gaps_s
        self._since_s, self._num_gaps, self._gaps_s = now_s, 0, 0.0
        if not num_gaps or passed_s <= 0 or gaps_s <= 0:
            return ()
        return (
            DecodeSample(
                batch=max(1, round(gaps_s / passed_s)), context_tokens=context_tokens, step_s=gaps_s / num_gaps
            ),
        )
