"""What plans promised, against what became of it. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from halfmoon.scheduling.contract import DecodeChoice
from halfmoon.schemas.ids import RequestId, WorkerId
from halfmoon.schemas.scheduling import Forecast
from halfmoon.schemas.splits import HalfEnded, Role

MAX_OPEN = 20_000
"""Requests of which an end is awaited; the oldest are forgotten."""
NEWEST_WEIGHT = 0.05
"""Of the newest request in the running means."""
MAX_ERROR = 10.0


@dataclass(slots=True)
class Record:
    """Predictions of one kind."""

    num_requests: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    error: float = 0.0

    def add(self, predicted_s: float, measured_s: float) -> None:
        if measured_s <= 0:
            return
        self.num_requests += 1
        weight = max(NEWEST_WEIGHT, 1 / self.num_requests)
        self.predicted_s += weight * (predicted_s - self.predicted_s)
        self.measured_s += weight * (measured_s - self.measured_s)
        error = min(MAX_ERROR, abs(predicted_s - measured_s) / measured_s)
        self.error += weight * (error - self.error)

    def report(self) -> Forecast | None:
        if not self.num_requests:
            return None
        return Forecast(
            num_requests=self.num_requests,
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            error=self.error,
        )


@dataclass(slots=True)
class Forecasts:
    """Of the requests that one conductor placed."""

    ttft: Record = field(default_factory=Record)
    tbt: Record = field(default_factory=Record)
    num_placed: int = 0
    num_prompt_chunks: int = 0
    num_matched_chunks: int = 0
    _open: OrderedDict[RequestId, tuple[WorkerId, float | None, float | None]] = field(default_factory=OrderedDict)

    def placed(self, request_id: RequestId, choice: DecodeChoice) -> None:
        """Its first choice took it. One that is placed again was not promised what it comes to."""
        self.num_placed += 1
        if self._open.pop(request_id, None) is None:
            self._open[request_id] = (choice.worker.worker, choice.ttft_s, choice.tbt_s)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def ended(self, ended: HalfEnded) -> None:
        if ended.role is Role.PREFILL:
            return
        promise = self._open.pop(ended.request_id, None)
        if promise is None or promise[0] != ended.worker or ended.error is not None:
            return
        _, ttft_s, tbt_s = promise
        if ttft_s is not None and ended.ttft_s is not None:
            self.ttft.add(ttft_s, ended.ttft_s)
        if tbt_s is not None and ended.tbt_s is not None:
            self.tbt.add(tbt_s, ended.tbt_s)
