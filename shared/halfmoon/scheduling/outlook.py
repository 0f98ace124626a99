"""What each decode worker runs, and will run: for the load at the time when a request's decode would begin. Pure.

A request passes through three times, and the outlook knows each as a fact or as a forecast:

    placed ───── prefill ─────▶ begins ───── decode ─────▶ ends
                          forecast: the plan's TTFT   forecast: as long as the decodes before it
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from halfmoon.schemas.ids import RequestId, WorkerId

MAX_DURATIONS = 512
"""Decodes remembered for how long they took."""
MAX_STARTS = 64
"""Decodes of one worker remembered for how long after their placing they began."""
MIN_STARTS = 8
MIN_SEEN_S = 1.0
"""Fewer starts, or such as came in less, make no rate."""
MAX_UNSHOWN = 8
"""A decode that has not begun, and that so many heartbeats of its worker don't name, never reached it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one decode worker runs at one time. Expected values, so not whole numbers."""

    num_requests: float = 0.0
    context_tokens: float = 0.0


@dataclass(slots=True)
class _Decode:
    worker: WorkerId
    context_tokens: int
    placed_s: float | None
    """None where that was not heard."""
    begins_s: float
    has_begun: bool = False
    num_unshown: int = 0
    """Heartbeats of its worker, in a row, that did not name it."""


class Durations:
    """How long decodes last: the last `MAX_DURATIONS` of them, as a distribution.

    Mooncake (arXiv 2407.00079v3 §7.4) gives every decode the same duration; this is that where all are alike, and
    knows where they differ that what has lasted long will last longer.
    """

    def __init__(self, max_durations: int = MAX_DURATIONS) -> None:
        self._max_durations = max_durations
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums: list[float] | None = None
        """Of the shortest n, for each n; as added up last, until another is added."""

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, duration_s: float) -> None:
        if len(self._recent) == self._max_durations:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(duration_s)
        insort(self._sorted, duration_s)
        self._sums = None

    def survival(self, age_s: float, more_s: float) -> float:
        """Probability that a decode which has lasted `age_s` lasts `more_s` longer. 1 while nothing is known.

        One that has outlasted all others is as likely as not to last as long again as it has (Lindy's law).
        """
        if not self._sorted or more_s <= 0.0:
            return 1.0
        total = len(self._sorted)
        older = total - bisect_right(self._sorted, age_s)
        if older == 0:
            return age_s / (age_s + more_s)
        return (total - bisect_right(self._sorted, age_s + more_s)) / older

    def within_s(self, seconds: float) -> float:
        """Of the first so many seconds, how many a decode lasts on average. All of them while nothing is known."""
        if seconds <= 0.0 or not self._sorted:
            return max(0.0, seconds)
        if self._sums is None:
            self._sums = list(accumulate(self._sorted, initial=0.0))
        num_ended = bisect_right(self._sorted, seconds)
        return (self._sums[num_ended] + seconds * (len(self._sorted) - num_ended)) / len(self._sorted)


class Overtaking:
    """Requests that nobody has placed yet, and that will have begun by a later time: as many as began lately.

    Without them, whoever begins late, for a long prompt or a long queue, would seem to find the batch half empty: all
    that is known of has ended by then. So those would be admitted who cost most.
    """

    def __init__(self) -> None:
        self._starts: deque[tuple[float, float, int]] = deque(maxlen=MAX_STARTS)
        """When each began, how long after it was placed, and its context."""

    def add(self, now_s: float, lead_s: float, context_tokens: int) -> None:
        self._starts.append((now_s, lead_s, context_tokens))

    def at(self, when_s: float, now_s: float, durations: Durations) -> Batch:
        """Those placed from now on that generate then: they have begun within as long as that, less their own lead, and
        of these only the last have not ended."""
        ahead_s = when_s - now_s
        if len(self._starts) < MIN_STARTS or ahead_s <= 0.0:
            return Batch()
        seen_s = max(now_s - self._starts[0][0], MIN_SEEN_S)
        shares = [(durations.within_s(ahead_s - lead_s) / seen_s, context) for _, lead_s, context in self._starts]
        return Batch(sum(share for share, _ in shares), sum(share * context for share, context in shares))


class Outlook:
    """The decodes of all workers, told by halves, heartbeats and ends. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self.durations = Durations()
        self._decodes: dict[RequestId, _Decode] = {}
        self._on: dict[WorkerId, dict[RequestId, _Decode]] = {}
        self._overtaking: dict[WorkerId, Overtaking] = {}

    def __len__(self) -> int:
        return len(self._decodes)

    def placed(
        self, worker: WorkerId, request_id: RequestId, context_tokens: int, begins_s: float, now_s: float
    ) -> None:
        """A decode worker was asked to generate, and is expected to begin then."""
        self.dropped(request_id)
        self._add(worker, request_id, _Decode(worker, context_tokens, now_s, begins_s))

    def began(self, request_id: RequestId, now_s: float) -> None:
        """Its first token was generated."""
        decode = self._decodes.get(request_id)
        if decode is not None and not decode.has_begun:
            decode.has_begun, decode.begins_s = True, now_s
            if decode.placed_s is not None:
                starts = self._overtaking.setdefault(decode.worker, Overtaking())
                starts.add(now_s, now_s - decode.placed_s, decode.context_tokens)

    def ended(self, request_id: RequestId, now_s: float) -> None:
        """It has generated its last token: its duration counts for the forecasts."""
        decode = self.dropped(request_id)
        if decode is not None and decode.has_begun:
            self.durations.add(max(0.0, now_s - decode.begins_s))

    def dropped(self, request_id: RequestId) -> _Decode | None:
        """It was refused, cancelled or moved: how long it took tells nothing."""
        decode = self._decodes.pop(request_id, None)
        if decode is not None:
            there = self._on[decode.worker]
            del there[request_id]
            if not there:
                del self._on[decode.worker]
        return decode

    def lost(self, worker: WorkerId) -> None:
        self._overtaking.pop(worker, None)
        for request_id in self._on.pop(worker, {}):
            del self._decodes[request_id]

    def shown(self, worker: WorkerId, num_tokens: Mapping[RequestId, int], now_s: float) -> None:
        """A worker's heartbeat: the requests that it has, and how many tokens each has generated.

        What had begun and isn't there any more has ended, whether its end was heard or not. What is there and wasn't
        known is, from now on.
        """
        there = self._on.get(worker, {})
        for request_id in [each for each in there if each not in num_tokens]:
            decode = there[request_id]
            decode.num_unshown += 1
            if decode.has_begun or decode.num_unshown > MAX_UNSHOWN:
                self.dropped(request_id)
        for request_id, num_generated in num_tokens.items():
            known = self._decodes.get(request_id)
            if known is None:
                known = self._add(worker, request_id, _Decode(worker, 0, None, now_s))
            if known.worker == worker:
                known.num_unshown = 0
                if num_generated:
                    self.began(request_id, now_s)

    def now(self, worker: WorkerId) -> Batch:
        """What generates now. What waits for its KV isn't counted: that is how admission by it errs."""
        running = [decode.context_tokens for decode in self._on.get(worker, {}).values() if decode.has_begun]
        return Batch(len(running), sum(running))

    def at(self, worker: WorkerId, when_s: float, now_s: float) -> Batch:
        """What will generate then: those that will have begun, each as likely as it is not to have ended; and those
        who will have come meanwhile, and begun sooner."""
        starts = self._overtaking.get(worker)
        coming = Batch() if starts is None else starts.at(when_s, now_s, self.durations)
        num_requests, context_tokens = coming.num_requests, coming.context_tokens
        for decode in self._on.get(worker, {}).values():
            likely = self._likely_there(decode, when_s, now_s)
            num_requests += likely
            context_tokens += likely * decode.context_tokens
        return Batch(num_requests, context_tokens)

    def _likely_there(self, decode: _Decode, when_s: float, now_s: float) -> float:
        if decode.has_begun:
            return self.durations.survival(now_s - decode.begins_s, when_s - now_s)
        # One that should have begun by now is late: it begins at once.
        begins_s = max(decode.begins_s, now_s)
        return self.durations.survival(0.0, when_s - begins_s) if begins_s <= when_s else 0.0

    def _add(self, worker: WorkerId, request_id: RequestId, decode: _Decode) -> _Decode:
        self._decodes[request_id] = decode
        self._on.setdefault(worker, {})[request_id] = decode
        return decode
