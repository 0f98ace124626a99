"""What a simulation counts while it runs; `report` makes figures of it."""

from dataclasses import dataclass, field

from halfmoon.sim.distribution import Distribution
from halfmoon.sim.request import Outcome, SimRequest


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of one request: time to first token, and mean time between its tokens. None: no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def is_met(self, request: SimRequest) -> bool:
        if request.outcome is not Outcome.FINISHED or request.ttft_s is None:
            return False
        in_time = self.ttft_s is None or request.ttft_s <= self.ttft_s
        return in_time and (self.tbt_s is None or (request.tbt_s or 0.0) <= self.tbt_s)


NO_LIMITS = Slo()


@dataclass(slots=True)
class Tally:
    slo: Slo
    ttft_s: Distribution = field(default_factory=Distribution)
    prefill_s: Distribution = field(default_factory=Distribution)
    """From arrival until the prompt is computed: what Mooncake's experiments with prefill call TTFT."""
    tbt_s: Distribution = field(default_factory=Distribution)
    """Of every gap between two tokens."""
    mean_tbt_s: Distribution = field(default_factory=Distribution)
    """Of requests."""
    e2e_s: Distribution = field(default_factory=Distribution)
    num_requests: int = 0
    num_finished: int = 0
    num_good: int = 0
    num_rejected: int = 0
    num_wasted: int = 0
    prompt_tokens: int = 0
    """Of prompts that were computed."""
    reused_tokens: int = 0
    completion_tokens: int = 0
    compute_s: float = 0.0
    wasted_s: float = 0.0
    bytes_pulled: int = 0
    bytes_handed_over: int = 0
    bytes_replicated: int = 0
    num_stale: int = 0
    """Prefixes cut short because a chunk wasn't where the index had it: recomputed."""
    last_end_s: float = 0.0

    def computed(self, request: SimRequest, chunk_tokens: int) -> None:
        """A prompt has its KV."""
        self.prompt_tokens += request.num_tokens
        self.reused_tokens += min(request.num_reused * chunk_tokens, request.num_tokens)
        self.compute_s += request.prefill_s
        if request.prefill_end_s is not None:
            self.prefill_s.add(request.prefill_end_s - request.at_s)

    def gaps(self, each_s: float, num_gaps: int) -> None:
        """So many tokens came so long after the one before. Within a stretch of steps, the mean stands for each."""
        if num_gaps > 0:
            self.tbt_s.add(each_s, num_gaps)

    def ended(self, request: SimRequest, now_s: float) -> None:
        self.last_end_s = max(self.last_end_s, now_s)
        match request.outcome:
            case Outcome.FINISHED:
                self._finished(request)
            case Outcome.WASTED:
                self.num_rejected += 1
                self.num_wasted += 1
                self.wasted_s += request.prefill_s
            case Outcome.REJECTED:
                self.num_rejected += 1
            case None:
                raise ValueError(f"{request.request_id} hasn't ended")

    def _finished(self, request: SimRequest) -> None:
        self.num_finished += 1
        self.completion_tokens += request.num_completion
        self.num_good += self.slo.is_met(request)
        if request.ttft_s is not None and request.e2e_s is not None:
            self.ttft_s.add(request.ttft_s)
            self.e2e_s.add(request.e2e_s)
        if request.tbt_s is not None:
            self.mean_tbt_s.add(request.tbt_s)
