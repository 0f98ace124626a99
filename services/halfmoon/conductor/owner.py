"""One request from delivery to settlement: state and facts to steps, steps to effects.

The delivery stays unsettled until the terminal state; what this conductor leaves unsettled when it dies is delivered to
another one, which looks for who runs it (`_adopt`) before it places it again.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import assert_never

import structlog

from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Delivery
from halfmoon.conductor.config import ConductorConfig
from halfmoon.conductor.dispatch import Dispatcher
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.gate import Gate
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.intake import Submission
from halfmoon.conductor.members import Members
from halfmoon.conductor.planning import Decision, Planner
from halfmoon.conductor.requests import OpenRequest, OpenRequests, class_of
from halfmoon.conductor.speaker import Speaker
from halfmoon.conductor.state import RequestEvent, RequestState
from halfmoon.conductor.texts import Texts
from halfmoon.conductor.watch import Facts, Finish, GiveUp, HandBack, Resplit, Resume, TellCancel, Wait, next_step
from halfmoon.scheduling.admission import card_of, check_tokens
from halfmoon.scheduling.slo import Breach
from halfmoon.schemas.ids import WorkerId, new_transfer_id
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import Context, Tracer, context_of, record_error
from halfmoon.tracing.attributes import (
    GEN_AI_REQUEST_MODEL,
    REQUEST_ID,
    SERVICE_CLASS,
    TENANT,
    TRANSFER_ID,
    AttributeValue,
)
from halfmoon.tracing.context import span_context
from halfmoon.tracing.names import CONDUCTOR_REQUEST, CONDUCTOR_SCHEDULE

MAX_DELIVERIES = 20
"""A request that was delivered more often has brought down, or outlived, every conductor that took it."""
MAX_WAIT_S = 1.0
"""Facts are looked at this often, also where nobody says that they have changed."""
MIN_PAUSE_S = 0.05
"""Before workers that were all busy are asked again; twice as long each time."""
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an owner works with; all shared by the requests of one conductor."""

    config: ConductorConfig
    planner: Planner
    gate: Gate
    dispatcher: Dispatcher
    members: Members
    flights: Flights
    requests: OpenRequests
    speaker: Speaker
    texts: Texts
    tracer: Tracer
    instruments: Instruments
    log: structlog.stdlib.BoundLogger


class Owner:
    """Runs requests, each in the task that calls `own`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
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
            await self._adopt(request)
        if request.state is RequestState.RECEIVED:
            if request.is_handed_back:
                await self._leave(request, RequestEvent.HAND_BACK)
                return
            if self._parts.requests.has_ended(request.request_id) and delivery.num_delivered > 1:
                await self._settle(request.delivery.ack())
                return
            refusal = await self._admit(request)
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
        runner = next((w for w, role in members.runners(request.request_id) if role is not Role.PREFILL), None)
        if runner is None:
            return False
        request.decode_worker = runner
        request.decode_life = members.life_of(runner)
        request.last_shown_beat = members.num_beats(runner)
        request.is_certain = True
        flight = self._parts.flights.get(request.request_id)
        if flight is not None and flight.transfer_id is not None:
            request.transfer_id = flight.transfer_id
            request.attempt = flight.attempt
            request.prefill_worker = flight.prefill_worker
            request.prefill_life = members.life_of(flight.prefill_worker) if flight.prefill_worker else None
        request.machine.fire(RequestEvent.ADOPT)
        self._parts.instruments.adopted.inc()
        self._parts.log.info("request adopted", request_id=request.request_id, decode_worker=runner)
        return True

    async def _admit(self, request: OpenRequest) -> Error | None:
        """Through the gate and to its workers, as soon as both have room. An error: it isn't served. It may also have
        been handed back while it waited."""
        error = await self._prepare(request)
        if error is not None:
            return error
        pause_s = MIN_PAUSE_S
        while True:
            error = await self._place(request, is_admitted=False)
            if error is None or error.code is not ErrorCode.OVERLOADED or request.state is not RequestState.PLACING:
                return error
            if self._parts.config.max_waiting == 0:
                return error
            # The workers were asked, and are busier than was known here.
            await self._parts.gate.pause(request, pause_s)
            pause_s = min(MAX_WAIT_S, 2 * pause_s)

    async def _place(self, request: OpenRequest, *, is_admitted: bool) -> Error | None:
        """Choose workers and have them take their halves. An error: no decode worker has it."""
        submission = request.submission
        attributes: dict[str, AttributeValue] = {
            REQUEST_ID: submission.request_id,
            GEN_AI_REQUEST_MODEL: submission.model,
            TENANT: submission.body.tenant,
            SERVICE_CLASS: class_of(submission.body),
        }
        with self._parts.tracer.span(CONDUCTOR_SCHEDULE, parent=request.context, attributes=attributes) as span:
            decision: Decision | Error | None
            if is_admitted:
                decision = await self._decide(request)
            else:
                decision = await self._parts.gate.enter(request, lambda: self._decided(request), context_of(span))
            if decision is None:
                return None
            error = decision if isinstance(decision, Error) else None
            if not isinstance(decision, Error):
                request.transfer_id = new_transfer_id()
                request.attempt = 1
                if request.state in (RequestState.RECEIVED, RequestState.WAITING):
                    request.machine.fire(RequestEvent.PLACE)
                self._parts.planner.carry_out(decision)
                # No wait before the decode half is sent: see `Gate.enter`.
                error = await self._parts.dispatcher.place(request, decision, time.monotonic())
                first = decision.plan.decodes[0]
                if error is None and request.decode_worker == first.worker.worker:
                    self._parts.instruments.forecasts.placed(request.request_id, first)
                span.set_attributes(_described(request, decision))
            if error is not None:
                if request.breach is not None:
                    span.set_attributes(_breached(request.breach))
                record_error(span, error.message, error.code.value)
            return error

    async def _decide(self, request: OpenRequest) -> Decision | Error:
        """Of a request that was admitted before, here or by another conductor."""
        error = await self._prepare(request)
        return error if error is not None else self._decided(request, is_admitted=True)

    async def _prepare(self, request: OpenRequest) -> Error | None:
        """Whatever can be told without asking who has room; afterwards its tokens are there."""
        submission = request.submission
        if request.cancel_reason is not None:
            return Error(code=ErrorCode.CANCELLED, message=request.cancel_reason)
        if time.time_ns() >= submission.deadline_ns:
            self._parts.instruments.rejected("deadline", class_of(submission.body))
            return Error(code=ErrorCode.DEADLINE, message="the deadline passed before the request could be placed")
        card = card_of(submission.model, self._parts.members.cluster())
        if isinstance(card, Error):
            return card
        error = self._parts.gate.check(submission.body)
        if error is not None:
            return error
        request.priority = self._parts.gate.priority(submission.body)
        if not request.tokens:
            tokens = await self._parts.texts.tokens(submission.body, submission.model)
            wrong = tokens if isinstance(tokens, Error) else check_tokens(tokens, card)
            if wrong is not None:
                return wrong
            request.tokens = () if isinstance(tokens, Error) else tuple(tokens)
        return None

    def _decided(self, request: OpenRequest, *, is_admitted: bool = False) -> Decision | Error:
        submission = request.submission
        return self._parts.planner.decide(
            request.request_id,
            submission.model,
            submission.body.tenant,
            request.tokens,
            submission.body.sampling.max_tokens,
            is_admitted=is_admitted,
        )

    async def _watch(self, request: OpenRequest) -> None:
        """Until the request has left this conductor."""
        while True:
            request.changed.clear()
            step = next_step(self._facts(request))
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
                        if lost is not None:
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
        )

    async def _resume(self, request: OpenRequest) -> Error | None:
        """The decode worker is lost: another goes on from the tokens that it told of."""
        lost = request.decode_worker
        request.num_moves += 1
        request.machine.fire(RequestEvent.RESUME)
        self._parts.instruments.moved("decode")
        self._parts.log.warning("decode worker lost; resuming", request_id=request.request_id, worker=lost)
        await self._parts.dispatcher.tell_unread(request)
        error = await self._place(request, is_admitted=True)
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
            decision = await self._decide(request)
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


def _num_hot(decision: Decision, worker: WorkerId | None) -> int:
    return decision.ask.num_hot(worker) if worker is not None else 0


def _described(request: OpenRequest, decision: Decision) -> dict[str, AttributeValue]:
    plan = decision.plan
    return {
        TRANSFER_ID: request.transfer_id or "",
        "halfmoon.schedule.prefill_worker": request.prefill_worker or "",
        "halfmoon.schedule.decode_worker": request.decode_worker or "",
        "halfmoon.schedule.matched_chunks": len(decision.ask.match),
        "halfmoon.schedule.reused_chunks": plan.prefills[0].num_reused if plan.prefills else 0,
        "halfmoon.schedule.pulled_chunks": plan.prefills[0].num_pulled if plan.prefills else 0,
        "halfmoon.schedule.prefill_hot_chunks": _num_hot(decision, request.prefill_worker),
        "halfmoon.schedule.decode_hot_chunks": _num_hot(decision, request.decode_worker),
        "halfmoon.schedule.prompt_tokens": len(request.tokens),
        "halfmoon.schedule.num_prefill_candidates": len(plan.prefills),
        "halfmoon.schedule.num_decode_candidates": len(plan.decodes),
        "halfmoon.schedule.reason": plan.reason,
    }


def _breached(breach: Breach) -> dict[str, AttributeValue]:
    return {
        "halfmoon.admission.limit": breach.limit.value,
        "halfmoon.admission.predicted_s": breach.predicted_s,
        "halfmoon.admission.limit_s": breach.limit_s,
    }
