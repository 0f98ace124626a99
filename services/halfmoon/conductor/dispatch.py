"""Asking workers to take their halves: the effects of a plan.

Decode is asked first, so that it listens when prefill begins to announce. Each half is offered to a bounded number of
workers. From the moment when a decode worker may have accepted, the request is that worker's to end: where no prefill
worker will have it, decode is told so, and computes the prompt itself.
"""

import time
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import structlog

from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.errors import BusError, BusTimeout, NoResponders, RemoteError, Undecodable
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.book import Book
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.conductor.planning import Decision
from halfmoon.conductor.requests import OpenRequest
from halfmoon.conductor.state import RequestEvent
from halfmoon.scheduling.admission import max_tokens
from halfmoon.scheduling.contract import DecodeChoice, PrefillChoice
from halfmoon.scheduling.slo import first_token_s
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.requests import RequestCancel
from halfmoon.schemas.splits import DecodeHalf, HalfAccepted, KvFailed, PrefillHalf, RequestTaken, Role, TransferDone
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tracing import inject

HEADER_SENDER = "halfmoon-sender"
"""On halves: the conductor that sent them, so that it need not read its own."""

RETRY_AFTER_S = 1.0
"""Where a busy worker names no time."""

_FINAL = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.PROMPT_TOO_LONG, ErrorCode.INVALID_MESSAGE})
"""Refusals that any other worker would repeat."""


@dataclass(frozen=True, slots=True)
class Accepted:
    pass


@dataclass(frozen=True, slots=True)
class Silent:
    """No answer came: the worker may have the half, or not."""


Answer: TypeAlias = Accepted | Silent | Error


class Dispatcher:
    """Sends halves for one conductor."""

    def __init__(
        self,
        bus: Bus,
        conductor: WorkerId,
        members: Members,
        flights: Flights,
        book: Book,
        instruments: Instruments,
        log: structlog.stdlib.BoundLogger,
        *,
        timeout_s: float,
        max_attempts: int,
    ) -> None:
        self._bus = bus
        self._conductor = conductor
        self._members = members
        self._flights = flights
        self._book = book
        self._instruments = instruments
        self._log = log
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts

    async def place(self, request: OpenRequest, decision: Decision, now_s: float) -> Error | None:
        """Find a decode worker, then a prefill worker where one is needed. An error: no decode worker has it."""
        refusal: Error | None = None
        for choice in decision.plan.decodes[: self._max_attempts]:
            if request.is_taken:
                return Error(code=ErrorCode.UNAVAILABLE, message="another conductor has got it")
            if request.cancel_reason is not None:
                return Error(code=ErrorCode.CANCELLED, message=request.cancel_reason)
            answer = await self._offer_decode(request, decision, choice, now_s)
            if not isinstance(answer, Error):
                request.machine.fire(RequestEvent.ACCEPT)
                if request.prefill_worker is not None:
                    await self.place_prefill(request, decision, time.monotonic())
                return None
            refusal = answer
            if answer.code in _FINAL:
                break
        return _as_refusal(refusal)

    async def _offer_decode(
        self, request: OpenRequest, decision: Decision, choice: DecodeChoice, now_s: float
    ) -> Answer:
        worker = choice.worker.worker
        prefills = decision.plan.prefills if choice.needs_prefill else ()
        prefill = prefills[0].worker.worker if prefills else None
        half = self._decode_half(request, decision, choice, prefill)
        request.decode_worker = worker
        request.decode_life = self._members.life_of(worker)
        request.last_shown_beat = self._members.num_beats(worker)
        request.prefill_worker = prefill
        request.prefill_life = self._members.life_of(prefill) if prefill is not None else None
        request.is_certain = False
        self._flights.sent_decode(worker, half)
        self._members.sent_decode(worker, half, now_s)
        self._book.sent_decode(worker, half, now_s, is_own=True)
        if prefill is not None:
            # To be sent when decode has accepted; what is decided until then must count with it.
            self._members.sent_prefill(prefill, self._prefill_half(request, decision, prefills[0]), now_s)
        answer = await self._ask(subjects.split_decode(worker), half, request, Role.DECODE)
        match answer:
            case Accepted():
                request.is_certain = True
                request.last_shown_beat = self._members.num_beats(worker)
            case Silent():
                pass
            case Error():
                self._members.refused(worker, request.request_id)
                self._book.refused(request.request_id)
                if prefill is not None:
                    self._members.refused(prefill, request.request_id)
                request.decode_worker = request.prefill_worker = None
        return answer

    async def place_prefill(self, request: OpenRequest, decision: Decision, now_s: float) -> bool:
        """Find a prefill worker for a half that decode waits for. False: none; decode was told, and computes."""
        refusal: Error | None = None
        for choice in decision.plan.prefills[: self._max_attempts]:
            if request.decode_end is not None:
                return False
            worker = choice.worker.worker
            if worker != request.prefill_worker:
                request.attempt += 1
                request.prefill_worker = worker
                request.prefill_life = self._members.life_of(worker)
                await self._tell_new_prefill(request, decision)
            answer = await self._offer_prefill(request, decision, choice, now_s)
            if isinstance(answer, Accepted):
                return True
            refusal = answer if isinstance(answer, Error) else None
        await self.tell_no_prefill(
            request, refusal or Error(code=ErrorCode.UNAVAILABLE, message="no prefill worker takes this prompt")
        )
        return False

    async def _offer_prefill(
        self, request: OpenRequest, decision: Decision, choice: PrefillChoice, now_s: float
    ) -> Answer:
        worker = choice.worker.worker
        half = self._prefill_half(request, decision, choice)
        self._flights.sent_prefill(worker, half)
        self._members.sent_prefill(worker, half, now_s)
        answer = await self._ask(subjects.split_prefill(worker), half, request, Role.PREFILL)
        if isinstance(answer, Error):
            self._members.refused(worker, request.request_id)
        return answer

    async def _tell_new_prefill(self, request: OpenRequest, decision: Decision) -> None:
        worker = request.decode_worker
        load = next((load for load in decision.cluster.workers if load.worker == worker), None)
        if worker is None or load is None:
            return
        choice = DecodeChoice(worker=load, num_hot=decision.ask.num_hot(worker))
        half = self._decode_half(request, decision, choice, request.prefill_worker)
        try:
            await announce(self._bus, subjects.split_decode(worker), half, headers=self._headers(request))
        except BusError as error:
            self._log.warning("decode was not told of its new prefill worker", error=str(error))

    async def tell_taken(self, request: OpenRequest) -> None:
        """To all conductors: this one has it now."""
        taken = RequestTaken(
            request_id=request.request_id,
            conductor=self._conductor,
            num_delivered=request.delivery.num_delivered,
        )
        try:
            await announce(self._bus, subjects.TAKEN, taken, headers=self._headers(request))
        except BusError as error:
            self._log.warning("other conductors were not told of a request", error=str(error))

    async def is_queued(self, request: OpenRequest) -> bool:
        """Whether the work queue still has it: a decode worker acknowledges it right after the client's end."""
        try:
            return await self._bus.stream_has(subjects.REQUESTS_STREAM, request.delivery.stream_seq)
        except BusError as error:
            self._log.warning("the work queue could not be asked", request_id=request.request_id, error=str(error))
            return True

    async def tell_no_prefill(self, request: OpenRequest, error: Error) -> None:
        """No KV will come: decode computes the prompt."""
        request.prefill_worker = None
        if request.decode_worker is None or request.transfer_id is None:
            return
        failed = KvFailed(request_id=request.request_id, transfer_id=request.transfer_id, error=error)
        await self._tell(subjects.kv_ready(request.decode_worker), failed, request)

    async def tell_unread(self, request: OpenRequest) -> None:
        """The decode worker is lost: nobody reads this transfer's KV, so prefill need not hold it."""
        worker, request.prefill_worker = request.prefill_worker, None
        if worker is not None and request.transfer_id is not None:
            done = TransferDone(request_id=request.request_id, transfer_id=request.transfer_id)
            await self._tell(subjects.split_prefill(worker), done, request)

    async def tell_cancel(self, request: OpenRequest, reason: str) -> None:
        """To the request's workers alone; they end it as they end any cancelled request."""
        cancel = RequestCancel(request_id=request.request_id, reason=reason)
        if request.decode_worker is not None:
            await self._tell(subjects.split_decode(request.decode_worker), cancel, request)
        if request.prefill_worker is not None:
            await self._tell(subjects.split_prefill(request.prefill_worker), cancel, request)

    async def tell_given_up(self, request: OpenRequest, lost: WorkerId) -> None:
        """The client has been told the end. Should that decode worker be there after all, it works for nobody."""
        cancel = RequestCancel(request_id=request.request_id, reason="given up: this worker was taken for lost")
        await self._tell(subjects.split_decode(lost), cancel, request)

    def _prefill_half(self, request: OpenRequest, decision: Decision, choice: PrefillChoice) -> PrefillHalf:
        if request.transfer_id is None or request.decode_worker is None:
            raise ValueError("prefill is asked only after decode")
        body = request.submission.body
        return PrefillHalf(
            request_id=request.request_id,
            transfer_id=request.transfer_id,
            conductor=self._conductor,
            model=request.submission.model,
            tenant=body.tenant,
            root=decision.root,
            tokens=request.tokens,
            reuse=decision.sources(choice),
            decode_worker=request.decode_worker,
            attempt=request.attempt,
            priority=request.priority,
            deadline_ns=request.submission.deadline_ns,
            num_hot=choice.num_hot,
        )

    def _decode_half(
        self, request: OpenRequest, decision: Decision, choice: DecodeChoice, prefill: WorkerId | None
    ) -> DecodeHalf:
        if request.transfer_id is None:
            raise ValueError("a transfer is named before its halves are sent")
        submission = request.submission
        body = submission.body
        limit = max_tokens(body.sampling.max_tokens, len(request.tokens), choice.worker.limit_tokens)
        return DecodeHalf(
            request_id=request.request_id,
            transfer_id=request.transfer_id,
            conductor=self._conductor,
            model=submission.model,
            tenant=body.tenant,
            root=decision.root,
            tokens=request.tokens,
            sampling=msgspec.structs.replace(body.sampling, max_tokens=limit),
            seed=submission.seed,
            reply=submission.reply,
            encoding=submission.encoding,
            receipt=request.delivery.receipt,
            queue_seq=request.delivery.stream_seq,
            prefill_worker=prefill,
            known=self._flights.known(request.request_id),
            cached_tokens=self._flights.cached_tokens(request.request_id),
            num_hot=choice.num_hot,
            attempt=request.attempt,
            service_class=body.service_class,
            begins_in_s=first_token_s(decision.plan, choice),
            waited_s=time.monotonic() - request.arrived_s,
            priority=request.priority,
            deadline_ns=request.submission.deadline_ns,
        )

    async def _ask(self, subject: str, half: PrefillHalf | DecodeHalf, request: OpenRequest, role: Role) -> Answer:
        answer: Answer
        try:
            await call(
                self._bus, subject, half, HalfAccepted, timeout_s=self._timeout_s, headers=self._headers(request)
            )
            answer = Accepted()
        except RemoteError as error:
            answer = error.error
        except NoResponders:
            answer = Error(code=ErrorCode.NO_WORKERS, message="the chosen worker is not there any more")
        except (BusTimeout, Undecodable) as error:
            self._log.warning("no clear answer to a half", subject=subject, error=str(error))
            answer = Silent()
        except BusError as error:
            answer = Error(code=ErrorCode.UNAVAILABLE, message=f"the broker did not take a half: {error}")
        self._instruments.asked(role.value, answer.code.value if isinstance(answer, Error) else _word(answer))
        return answer

    async def _tell(self, subject: str, message: KvFailed | RequestCancel | TransferDone, request: OpenRequest) -> None:
        try:
            await announce(self._bus, subject, message, headers=self._headers(request))
        except BusError as error:
            self._log.warning("a worker could not be told", subject=subject, error=str(error))

    def _headers(self, request: OpenRequest) -> dict[str, str]:
        headers = {HEADER_SENDER: str(self._conductor)}
        inject(headers, request.context)
        return headers


def _as_refusal(last: Error | None) -> Error:
    """What a client is told when nobody took its request."""
    if last is None:
        return Error(code=ErrorCode.NO_WORKERS, message="no decode worker could be asked")
    if last.code is ErrorCode.BUSY:
        return Error(
            code=ErrorCode.OVERLOADED,
            message=f"all decode workers that were asked are busy: {last.message}",
            retry_after_s=last.retry_after_s or RETRY_AFTER_S,
        )
    return last


def _word(answer: Accepted | Silent) -> str:
    return "accepted" if isinstance(answer, Accepted) else "silent"
