"""A request on its way to workers: checked, let in, decided on, offered. `owner` sees it to its end."""

import time

from halfmoon.conductor.parts import Parts
from halfmoon.conductor.planning import Decision
from halfmoon.conductor.requests import OpenRequest, class_of
from halfmoon.conductor.state import RequestEvent, RequestState
from halfmoon.scheduling.admission import card_of, check_tokens
from halfmoon.scheduling.slo import Breach
from halfmoon.schemas.ids import WorkerId, new_transfer_id
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import context_of, record_error
from halfmoon.tracing.attributes import (
    GEN_AI_REQUEST_MODEL,
    REQUEST_ID,
    SERVICE_CLASS,
    TENANT,
    TRANSFER_ID,
    AttributeValue,
)
from halfmoon.tracing.names import CONDUCTOR_SCHEDULE

MAX_PAUSE_S = 1.0
MIN_PAUSE_S = 0.05
"""Before workers that were all busy are asked again; twice as long each time."""


class Placing:
    """Of one conductor."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def admit(self, request: OpenRequest) -> Error | None:
        """Through the gate and to its workers, as soon as both have room. An error: it isn't served. It may also have
        been handed back while it waited."""
        error = await self._prepare(request)
        if error is not None:
            return error
        pause_s = MIN_PAUSE_S
        while True:
            error = await self.place(request, is_admitted=False)
            if error is None or error.code is not ErrorCode.OVERLOADED or request.state is not RequestState.PLACING:
                return error
            if self._parts.config.max_waiting == 0:
                return error
            # The workers were asked, and are busier than was known here.
            await self._parts.gate.pause(request, pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def place(self, request: OpenRequest, *, is_admitted: bool) -> Error | None:
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
                decision = await self.decide(request)
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

    async def decide(self, request: OpenRequest) -> Decision | Error:
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
