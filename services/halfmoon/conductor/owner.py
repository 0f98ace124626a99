"""One request from delivery to settlement: state and facts to steps, steps to effects.

The delivery stays unsettled until the terminal state; what this conductor leaves unsettled when it dies is delivered to
another one, which looks for who runs it (`_adopt`) before it places it again.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import assert_never

from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Delivery
from halfmoon.conductor.intake import Submission
from halfmoon.conductor.parts import Parts
from halfmoon.conductor.placing import Placing
from halfmoon.conductor.requests import OpenRequest
from halfmoon.conductor.state import RequestEvent, RequestState
from halfmoon.conductor.watch import Facts, Finish, GiveUp, HandBack, Resplit, Resume, TellCancel, Wait, next_step
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Context, context_of
from halfmoon.tracing.attributes import (
    REQUEST_ID,
)
from halfmoon.tracing.context import span_context
from halfmoon.tracing.names import CONDUCTOR_REQUEST

MAX_DELIVERIES = 20
"""A request that was delivered more often has brought down, or outlived, every conductor that took it."""
MAX_WAIT_S = 1.0
"""Facts are looked at this often, also where nobody says that they have changed."""
_NS_PER_S = 1_000_000_000


class Owner:
    """Runs requests, each in the task that calls `own`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._placing = Placing(parts)
        self._grace_ns = int(parts.config.deadline_grace_s * _NS_PER_S)

    async def own(self, submission: Submission, delivery: Delivery) -> None:
        """See one request to its end. Returns with the delivery settled; or another call has it already."""
        requests = self._parts.requests
        known = requests.get(submission.request_id)
        if known is not None:
            await self._meet_again(known, delivery)
            return
        if delivery.num_delivered > 1 and requests.has_ended(submission.request_id):
            await self._settle(delivery.ack())
            return
        root = None
        context = submission.context
        if span_context(context) is None:
            root = self._parts.tracer.start_span(
                CONDUCTOR_REQUEST, parent=Context(), attributes={REQUEST_ID: submission.request_id}
            )
            context = context_of(root)
        request = OpenRequest(submission, delivery, context)
        requests.add(request)
        self._parts.instruments.open_requests.set(len(requests))
        try:
            await self._run(request)
        finally:
            requests.remove(request)
            self._parts.gate.wake()
            self._parts.instruments.open_requests.set(len(requests))
            if root is not None:
                root.end()

    async def _meet_again(self, known: OpenRequest, delivery: Delivery) -> None:
        if known.delivery.stream_seq == delivery.stream_seq:
            known.delivery = delivery
        else:
            self._parts.log.warning("a request id was submitted twice", request_id=known.request_id)
            await self._settle(delivery.term())

    async def _run(self, request: OpenRequest) -> None:
        delivery = request.delivery
        if delivery.num_delivered > MAX_DELIVERIES:
            error = Error(
                code=ErrorCode.INTERNAL,
                message=f"given up after {MAX_DELIVERIES} attempts; the conductors' logs say why",
            )
            await self._refuse(request, error)
            return
        if delivery.num_delivered > 1:
            await self._parts.dispatcher.tell_taken(request)
            await self._adopt(request)
        if request.state is RequestState.RECEIVED:
            if request.is_handed_back:
                await self._leave(request, RequestEvent.HAND_BACK)
                return
            if self._parts.requests.has_ended(request.request_id) and delivery.num_delivered > 1:
                await self._settle(request.delivery.ack())
                return
            refusal = await self._placing.admit(request)
            if refusal is not None:
                await self._refuse(request, refusal)
                return
            if request.is_handed_back and request.state in (RequestState.RECEIVED, RequestState.WAITING):
                await self._leave(request, RequestEvent.HAND_BACK)
                return
        await self._watch(request)

    async def _adopt(self, request: OpenRequest) -> None:
        """Listen for a decode worker that runs it, for one round of heartbeats and a little."""
        try:
            async with asyncio.timeout(self._parts.config.adopt_wait_s):
                while not self._take_over(request) and not self._parts.requests.has_ended(request.request_id):
                    request.changed.clear()
                    await request.changed.wait()
        except TimeoutError:
            return

    def _take_over(self, request: OpenRequest) -> bool:
        members = self._parts.members
        flight = self._parts.flights.get(request.request_id)
        runners = [worker for worker, role in members.runners(request.request_id) if role is not Role.PREFILL]
        if not runners:
            return False
        # Of several, one had been taken for lost: it goes on where it was given last.
        runner = flight.decode_worker if flight is not None and flight.decode_worker in runners else runners[0]
        request.decode_worker = runner
        request.decode_life = members.life_of(runner)
        request.last_shown_beat = members.num_beats(runner)
        request.is_certain = True
        if flight is not None and flight.transfer_id is not None and flight.decode_worker in (None, runner):
            request.transfer_id = flight.transfer_id
            request.attempt = flight.attempt
            request.prefill_worker = flight.prefill_worker
            request.prefill_life = members.life_of(flight.prefill_worker) if flight.prefill_worker else None
        request.machine.fire(RequestEvent.ADOPT)
        self._parts.instruments.adopted.inc()
        self._parts.log.info("request adopted", request_id=request.request_id, decode_worker=runner)
        return True

    async def _watch(self, request: OpenRequest) -> None:
        """Until the request has left this conductor."""
        while True:
            request.changed.clear()
            step = next_step(self._facts(request))
            if isinstance(step, Resume | GiveUp) and not await self._parts.dispatcher.is_queued(request):
                step = Finish(is_heard=False)  # its decode worker ended it, and died before it could tell
            match step:
                case Finish(is_heard):
                    if not is_heard:
                        self._parts.log.warning("a request ended unheard", request_id=request.request_id)
                    if request.decode_end is not None and request.decode_end.usage is not None:
                        submission = request.submission
                        self._parts.instruments.used(submission.body.tenant, submission.model, request.decode_end.usage)
                    await self._leave(request, RequestEvent.FINISH)
                    return
                case Resume():
                    lost = request.decode_worker
                    error = await self._resume(request)
                    if error is not None:
                        await self._refuse(request, error)
                        if lost is not None and not request.is_taken:
                            await self._parts.dispatcher.tell_given_up(request, lost)
                        return
                case GiveUp(is_cancelled, is_late):
                    await self._parts.dispatcher.tell_unread(request)
                    await self._refuse(request, self._given_up(request, is_cancelled=is_cancelled, is_late=is_late))
                    return
                case Resplit():
                    await self._resplit(request)
                case TellCancel(is_late):
                    await self._tell_cancel(request, is_late=is_late)
                case HandBack():
                    await self._leave(request, RequestEvent.HAND_BACK)
                    return
                case Wait(until_ns):
                    await request.wait(min(MAX_WAIT_S, (until_ns - time.time_ns()) / _NS_PER_S))
                case _ as unreachable:
                    assert_never(unreachable)

    def _facts(self, request: OpenRequest) -> Facts:
        members, decode, prefill = self._parts.members, request.decode_worker, request.prefill_worker
        return Facts(
            now_ns=time.time_ns(),
            deadline_ns=request.submission.deadline_ns,
            grace_ns=self._grace_ns,
            has_ended=request.decode_end is not None,
            is_certain=request.is_certain,
            num_unshown_beats=members.num_beats(decode) - request.last_shown_beat if decode is not None else 0,
            is_decode_lost=decode is None or members.life_of(decode) != request.decode_life,
            is_prefill_lost=prefill is not None and members.life_of(prefill) != request.prefill_life,
            is_cancelled=request.cancel_reason is not None,
            is_cancel_sent=request.is_cancel_sent,
            late_since_ns=request.late_since_ns,
            can_move=request.num_moves < self._parts.config.max_resplits,
            is_handed_back=request.is_handed_back,
            is_taken=request.is_taken,
        )

    async def _resume(self, request: OpenRequest) -> Error | None:
        """The decode worker is lost: another goes on from the tokens that it told of."""
        lost = request.decode_worker
        request.num_moves += 1
        request.machine.fire(RequestEvent.RESUME)
        self._parts.instruments.moved("decode")
        self._parts.log.warning("decode worker lost; resuming", request_id=request.request_id, worker=lost)
        await self._parts.dispatcher.tell_unread(request)
        error = await self._placing.place(request, is_admitted=True)
        if error is None or error.code in (ErrorCode.CANCELLED, ErrorCode.DEADLINE):
            return error
        return Error(
            code=ErrorCode.WORKER_LOST,
            message=f"decode worker {lost} was lost, and nobody could go on: {error.message}",
            retry_after_s=error.retry_after_s,
        )

    async def _resplit(self, request: OpenRequest) -> None:
        """The prefill worker is lost: another takes its half, or decode computes."""
        lost, request.prefill_worker = request.prefill_worker, None
        request.machine.fire(RequestEvent.RESPLIT)
        self._parts.instruments.moved("prefill")
        self._parts.log.warning("prefill worker lost; re-splitting", request_id=request.request_id, worker=lost)
        error = Error(code=ErrorCode.WORKER_LOST, message=f"prefill worker {lost} was lost, and no other is there")
        if request.num_moves < self._parts.config.max_resplits:
            request.num_moves += 1
            decision = await self._placing.decide(request)
            card = self._parts.members.card_of(request.decode_worker) if request.decode_worker is not None else None
            if isinstance(decision, Error):
                error = decision
            elif card is not None and decision.root == self._parts.planner.root(card, request.submission.body.tenant):
                self._parts.planner.carry_out(decision)
                await self._parts.dispatcher.place_prefill(request, decision, time.monotonic())
                return
        await self._parts.dispatcher.tell_no_prefill(request, error)

    async def _tell_cancel(self, request: OpenRequest, *, is_late: bool) -> None:
        if is_late:
            request.late_since_ns = time.time_ns()
            reason = "the deadline has passed"
        else:
            request.is_cancel_sent = True
            reason = request.cancel_reason or "cancelled"
        await self._parts.dispatcher.tell_cancel(request, reason)

    def _given_up(self, request: OpenRequest, *, is_cancelled: bool, is_late: bool) -> Error:
        worker = request.decode_worker
        if is_cancelled:
            return Error(code=ErrorCode.CANCELLED, message=request.cancel_reason or "cancelled")
        if is_late:
            return Error(code=ErrorCode.DEADLINE, message=f"decode worker {worker} did not end it by its deadline")
        return Error(
            code=ErrorCode.WORKER_LOST,
            message=f"decode worker {worker} was lost, after {request.num_moves} others; not tried again",
        )

    async def _refuse(self, request: OpenRequest, error: Error) -> None:
        """This conductor ends the request: it says so, then settles. What can't be said is left for a redelivery."""
        if request.is_taken:
            await self._leave(request, RequestEvent.HAND_BACK)
            return
        submission = request.submission
        try:
            await self._parts.speaker.fail(
                submission.reply, submission.encoding, request.request_id, error, request.context
            )
        except BusError as problem:
            self._parts.log.warning("a failure can't be told yet", request_id=request.request_id, error=str(problem))
            await self._settle(request.delivery.nak(1.0))
            return
        self._parts.log.info("request ended", request_id=request.request_id, code=error.code.value)
        await self._leave(request, RequestEvent.CANCEL if error.code is ErrorCode.CANCELLED else RequestEvent.FAIL)

    async def _leave(self, request: OpenRequest, event: RequestEvent) -> None:
        state = request.machine.fire(event)
        self._parts.instruments.left(state)
        if state is RequestState.HANDED_BACK:
            if request.is_taken:
                self._parts.log.warning("another conductor has got the request", request_id=request.request_id)
            else:
                await self._settle(request.delivery.nak())
            return
        self._parts.requests.ended(request.request_id)
        self._parts.flights.forget(request.request_id)
        await self._settle(request.delivery.ack())

    async def _settle(self, settling: Coroutine[None, None, None]) -> None:
        """A settlement that gets lost costs a redelivery, which is known by its id."""
        try:
            await settling
        except BusError as error:
            self._parts.log.warning("a delivery could not be settled", error=str(error))
