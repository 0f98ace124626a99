"""The way in: each request waits here until it is its turn, a worker has room, and its limits can be kept.

No delivery is settled here: what waits in a conductor that dies is delivered to another one. Nothing waits past its
deadline, or past the time to first token that its class allows.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from opentelemetry.trace import Span

from halfmoon.conductor.book import Book, Room
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.planning import Decision
from halfmoon.conductor.requests import OpenRequest, OpenRequests, class_of
from halfmoon.conductor.state import RequestEvent, RequestState
from halfmoon.scheduling.fairness import Share
from halfmoon.scheduling.service_class import ServiceClass
from halfmoon.scheduling.slo import Admission, Breach
from halfmoon.schemas.members import WorkerHeartbeat
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Context, Tracer
from halfmoon.tracing.names import CONDUCTOR_WAIT

MAX_WAIT_S = 1.0
"""Whoever waits looks this often whether it may go on, also where nobody says so."""
_NS_PER_S = 1_000_000_000

Decide = Callable[[], Decision | Error]


class Gate:
    """Of one conductor."""

    def __init__(
        self,
        book: Book,
        requests: OpenRequests,
        admission: Admission,
        classes: Mapping[str, ServiceClass],
        instruments: Instruments,
        tracer: Tracer,
        *,
        max_in_flight: int,
        max_waiting_per_worker: int,
        retry_after_s: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._book = book
        self._requests = requests
        self._admission = admission
        self._classes = classes
        self._instruments = instruments
        self._tracer = tracer
        self._max_in_flight = max_in_flight
        self._max_waiting_per_worker = max_waiting_per_worker
        self._retry_after_s = retry_after_s
        self._is_draining = is_draining

    def check(self, body: RequestSubmitted) -> Error | None:
        """Why a request's class can't be served."""
        if class_of(body) in self._classes:
            return None
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"no class of service {body.service_class!r}; there is {', '.join(sorted(self._classes))}",
        )

    def priority(self, body: RequestSubmitted) -> int:
        """Of the request's halves, in a worker's line."""
        return body.priority + self._classes[class_of(body)].priority

    async def enter(self, request: OpenRequest, decide: Decide, context: Context) -> Decision | Error | None:
        """Wait for the turn and for room, then decide. An error: why it doesn't get in. None: it was handed back.
        `context`: of the span that the wait is part of.

        After a decision the caller sends the decode half without waiting for anything else: whose turn it is next
        decides with that load in view.
        """
        body = request.submission.body
        name = class_of(body)
        room = self._book.room(request.submission.model)
        room.enter(
            request.request_id,
            Share(service_class=name, tenant=body.tenant),
            num_tokens=len(request.tokens),
            arrived_s=request.arrived_s,
            now_s=time.monotonic(),
            priority=body.priority,
        )
        span: Span | None = None
        try:
            while True:
                request.changed.clear()
                passed = self._pass(request, room, decide)
                if passed is not None or request.is_handed_back:
                    return passed
                if span is None:
                    refusal = self._make_room(request, room)
                    if refusal is not None:
                        return refusal
                    if self._is_draining():
                        request.hand_back()
                        return None
                    span = self._begin_waiting(request, context)
                await self._changed(request)
        finally:
            room.leave(request.request_id)
            self._wake_soon(room)
            if span is not None:
                self._instruments.waited(name, time.monotonic() - request.arrived_s)
                span.end()

    async def pause(self, request: OpenRequest, seconds: float) -> None:
        """Before another attempt, where workers said that they are busy after all."""
        request.machine.fire(RequestEvent.WAIT)
        request.changed.clear()
        await request.wait(seconds)

    def wake(self) -> None:
        """There may be room, for whoever is next."""
        for _, room in self._book.rooms():
            self._wake(room)

    def heard(self, beat: WorkerHeartbeat) -> None:
        """A worker's heartbeat: wakes the next one only where that worker takes more."""
        if beat.num_waiting < self._max_waiting_per_worker:
            self.wake()

    def _pass(self, request: OpenRequest, room: Room, decide: Decide) -> Decision | Error | None:
        """What the request's waiting comes to, if it does now."""
        error = self._out(request, room)
        if error is not None or request.is_handed_back:
            return error
        if room.next() != request.request_id:
            return None
        if len(self._requests) - self._book.num_waiting >= self._max_in_flight:
            return None
        decision = decide()
        if isinstance(decision, Error):
            return None if decision.code is ErrorCode.OVERLOADED else decision
        now_s = time.monotonic()
        name = class_of(request.submission.body)
        judged = self._admission.judge(
            decision.plan, decision.ask, self._classes[name], now_s, now_s - request.arrived_s
        )
        if isinstance(judged, Breach):
            return self._reject(request, judged)
        room.serve(now_s)
        return decision.with_plan(judged)

    def _out(self, request: OpenRequest, room: Room) -> Error | None:
        """Why it needn't wait any longer."""
        submission = request.submission
        if request.cancel_reason is not None:
            return Error(code=ErrorCode.CANCELLED, message=request.cancel_reason)
        if request.turned_away is not None:
            return request.turned_away
        name = class_of(submission.body)
        if time.time_ns() >= submission.deadline_ns:
            self._instruments.rejected("deadline", name)
            return Error(code=ErrorCode.DEADLINE, message="the deadline passed before a worker had room; nothing ran")
        now_s = time.monotonic()
        waited_s, service = now_s - request.arrived_s, self._classes[name]
        if self._admission.late(waited_s, service) is None:
            return None
        left_s = room.expected_wait_s(request.request_id, now_s) or self._retry_after_s
        breach = self._admission.late(waited_s + left_s, service)
        return self._reject(request, breach) if breach is not None else None

    def _make_room(self, request: OpenRequest, room: Room) -> Error | None:
        """It will have to wait: whether it may, and who has to go for it."""
        now_s = time.monotonic()
        expected_s = room.expected_wait_s(request.request_id, now_s)
        if expected_s is not None:
            waited_s = now_s - request.arrived_s
            breach = self._admission.late(waited_s + expected_s, self._classes[class_of(request.submission.body)])
            if breach is not None:
                return self._reject(request, breach)
        while (surplus := room.surplus()) is not None:
            away = self._requests.get(surplus)
            room.leave(surplus)
            if away is None:
                continue
            expected_s = room.expected_wait_s(request.request_id, now_s) if away is not request else expected_s
            error = self._full(away, expected_s)
            if away is request:
                return error
            away.turn_away(error)
        return None

    def _full(self, request: OpenRequest, expected_s: float | None) -> Error:
        body = request.submission.body
        self._instruments.rejected("full", class_of(body))
        return Error(
            code=ErrorCode.OVERLOADED,
            message=f"all workers for {request.submission.model!r} are busy, and of those that wait for one, this "
            f"class and tenant ({class_of(body)}, {body.tenant}) have the most; try again later",
            retry_after_s=max(expected_s or 0.0, self._retry_after_s),
        )

    def _reject(self, request: OpenRequest, breach: Breach) -> Error:
        name = class_of(request.submission.body)
        self._instruments.rejected(breach.limit.value, name)
        request.breach = breach
        return breach.error(name)

    def _begin_waiting(self, request: OpenRequest, context: Context) -> Span:
        if request.state is RequestState.RECEIVED:
            request.machine.fire(RequestEvent.WAIT)
        return self._tracer.start_span(CONDUCTOR_WAIT, parent=context)

    async def _changed(self, request: OpenRequest) -> None:
        left_s = (request.submission.deadline_ns - time.time_ns()) / _NS_PER_S
        limit_s = self._classes[class_of(request.submission.body)].ttft_s
        if limit_s is not None:
            left_s = min(left_s, request.arrived_s + limit_s - time.monotonic())
        # A little late, rather than a little early and once more.
        await request.wait(min(MAX_WAIT_S, left_s + 0.001))

    def _wake_soon(self, room: Room) -> None:
        """Once the caller has gone on, up to its next wait."""
        asyncio.get_running_loop().call_soon(self._wake, room)

    def _wake(self, room: Room) -> None:
        first = room.next()
        request = self._requests.get(first) if first is not None else None
        if request is not None:
            request.changed.set()
