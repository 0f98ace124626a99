"""How a conductor places requests, and how well it foresees times: in its heartbeats, for `halfmoon top`."""

from halfmoon.schemas.wire import Message


class CostModel(Message, frozen=True):
    """One fitted cost model: seconds = coefficients · features."""

    kind: str
    """`prefill`: 1, new tokens, token pairs. `tbt`: 1, batch, tokens of context. `pull` and `ssd`: 1, bytes."""
    subject: str
    """Whose: a worker's, a model's, a link's, all links'."""
    coefficients: tuple[float, ...]
    num_samples: int
    error: float
    """Running mean of |predicted - measured| / measured."""


class Forecast(Message, frozen=True):
    """What was predicted of requests when they were placed, and what they took; running means."""

    num_requests: int
    predicted_s: float
    measured_s: float
    error: float
    """Running mean of |predicted - measured| / measured."""


class SchedulingReport(Message, frozen=True):
    policy: str
    num_placed: int = 0
    """Requests, since the start."""
    num_open: int = 0
    num_prompt_chunks: int = 0
    """Whole chunks of the prompts placed."""
    num_matched_chunks: int = 0
    """Of these, how many some pool had."""
    balancing_threshold: float | None = None
    """None where the policy has none."""
    imbalance: float | None = None
    """Longest queue of a prefill worker over the mean, lately."""
    ttft: Forecast | None = None
    tbt: Forecast | None = None
    models: tuple[CostModel, ...] = ()
    """Those of most samples."""
