"""One request while this conductor owns it: what is decided, and what was heard of it. No effects."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeVar

from halfmoon.bus.protocol import Delivery
from halfmoon.conductor.intake import Submission
from halfmoon.conductor.state import INITIAL, TABLE, RequestEvent, RequestState
from halfmoon.machine import Machine
from halfmoon.scheduling.service_class import DEFAULT_CLASS
from halfmoon.scheduling.slo import Breach
from halfmoon.schemas.ids import RequestId, TransferId, WorkerId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.splits import HalfEnded, Role
from halfmoon.schemas.wire import Error
from halfmoon.tracing import Context


class OpenRequest:
    """What others tell is latched in fields, and `changed` is set: nothing queues up, nothing is lost."""

    def __init__(self, submission: Submission, delivery: Delivery, context: Context) -> None:
        self.submission = submission
        self.delivery = delivery
        """The latest one: the broker may deliver again what is open here."""
        self.context = context
        """Parent of both halves' spans."""
        self.arrived_s = time.monotonic()
        self.machine: Machine[RequestState, RequestEvent] = Machine(TABLE, INITIAL)
        self.changed = asyncio.Event()
        self.tokens: tuple[int, ...] = ()
        self.card: ModelCard | None = None
        self.transfer_id: TransferId | None = None
        self.attempt = 1
        self.num_moves = 0
        self.decode_worker: WorkerId | None = None
        self.decode_life: int | None = None
        """Start time of that life of the worker which has the half."""
        self.is_certain = False
        """Whether the decode worker is known to have it: it said so, or a heartbeat did."""
        self.last_shown_beat = 0
        """Number of the worker's last heartbeat that named it, or that came before it was sent."""
        self.prefill_worker: WorkerId | None = None
        """None where prefill has ended, or there is nothing for it to do."""
        self.prefill_life: int | None = None
        self.priority = submission.body.priority
        """Of its halves, in workers' lines."""
        self.turned_away: Error | None = None
        """Why it may not wait any longer."""
        self.breach: Breach | None = None
        """The limit of its class that it would have broken."""
        self.cancel_reason: str | None = None
        self.is_cancel_sent = False
        self.late_since_ns: int | None = None
        """When the workers were told that the deadline has passed."""
        self.is_handed_back = False
        self.is_taken = False
        """By another conductor, to which the broker delivered it later."""
        self._decode_ends: dict[WorkerId, HalfEnded] = {}

    @property
    def request_id(self) -> RequestId:
        return self.submission.request_id

    @property
    def state(self) -> RequestState:
        return self.machine.state

    @property
    def decode_end(self) -> HalfEnded | None:
        """How the decode worker ended the request, once it has."""
        ended = self._decode_ends.get(self.decode_worker) if self.decode_worker is not None else None
        return ended if ended is not None and self._is_present(ended.transfer_id) else None

    async def wait(self, timeout_s: float) -> None:
        """Until somebody has told something, or so long."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self.changed.wait()
        except TimeoutError:
            return

    def cancel(self, reason: str) -> None:
        if self.cancel_reason is None:
            self.cancel_reason = reason
            self.changed.set()

    def turn_away(self, error: Error) -> None:
        self.turned_away = error
        self.changed.set()

    def hand_back(self) -> None:
        self.is_handed_back = True
        self.changed.set()

    def half_ended(self, ended: HalfEnded) -> None:
        if ended.role is Role.PREFILL:
            self.prefill_done(ended.worker, ended.transfer_id)
        else:
            self._decode_ends[ended.worker] = ended
            self.changed.set()

    def prefill_done(self, worker: WorkerId, transfer_id: TransferId) -> None:
        """Decode has all of its KV, or prefill has told it that no more will come."""
        if self.prefill_worker == worker and self._is_present(transfer_id):
            self.prefill_worker = None

    def _is_present(self, transfer_id: TransferId) -> bool:
        """Whether that is how the request is placed now: the same worker may have had it before, and end that later."""
        return self.transfer_id in (None, transfer_id)

    def shown(self, worker: WorkerId, beat: int) -> None:
        """A decode worker's heartbeat named this request."""
        if self.decode_worker in (None, worker):
            self.is_certain = True
            self.last_shown_beat = beat
        if self.decode_worker is None:
            self.changed.set()


def class_of(body: RequestSubmitted) -> str:
    """The name of its class of service."""
    return body.service_class or DEFAULT_CLASS


_V = TypeVar("_V")


class OpenRequests:
    """All that this conductor owns, and those that ended not long ago."""

    def __init__(self, max_remembered: int = 20_000) -> None:
        self._open: dict[RequestId, OpenRequest] = {}
        self._ended: OrderedDict[RequestId, None] = OrderedDict()
        self._cancelled: OrderedDict[RequestId, str] = OrderedDict()
        self._max_remembered = max_remembered

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(tuple(self._open.values()))

    def get(self, request_id: RequestId) -> OpenRequest | None:
        return self._open.get(request_id)

    def add(self, request: OpenRequest) -> None:
        """Also cancels it at once, where its cancel was heard before it."""
        self._open[request.request_id] = request
        reason = self._cancelled.pop(request.request_id, None)
        if reason is not None:
            request.cancel(reason)

    def remove(self, request: OpenRequest) -> None:
        self._open.pop(request.request_id, None)

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """Cancel it; or remember that, should it still wait in the broker."""
        request = self._open.get(request_id)
        if request is not None:
            request.cancel(reason)
        elif request_id not in self._ended:
            self._remember(self._cancelled, request_id, reason)

    def ended(self, request_id: RequestId) -> None:
        """Somebody has told its client the end."""
        self._cancelled.pop(request_id, None)
        self._remember(self._ended, request_id, None)

    def taken(self, request_id: RequestId, num_delivered: int) -> None:
        """Another conductor has got it, by that delivery."""
        request = self._open.get(request_id)
        if request is not None and request.delivery.num_delivered < num_delivered:
            request.is_taken = True
            request.hand_back()

    def is_cancelled(self, request_id: RequestId) -> bool:
        """Whether its cancel came before it did."""
        return request_id in self._cancelled

    def has_ended(self, request_id: RequestId) -> bool:
        return request_id in self._ended

    def on_worker(self, worker: WorkerId) -> Iterator[OpenRequest]:
        return (request for request in self if worker in (request.decode_worker, request.prefill_worker))

    def _remember(self, memory: OrderedDict[RequestId, _V], request_id: RequestId, value: _V) -> None:
        memory[request_id] = value
        memory.move_to_end(request_id)
        while len(memory) > self._max_remembered:
            memory.popitem(last=False)
