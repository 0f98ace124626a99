"""What this worker has ended, for conductors that were not there to hear it."""

from collections import OrderedDict

from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.splits import HalfEnded

MAX_ENDED = 4096


class EndedHalves:
    """The last `max_ended` requests whose clients were told the end here."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._ended: OrderedDict[RequestId, HalfEnded] = OrderedDict()
        self._max_ended = max_ended

    def add(self, ended: HalfEnded) -> None:
        self._ended[ended.request_id] = ended
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def get(self, request_id: RequestId) -> HalfEnded | None:
        return self._ended.get(request_id)
