"""What a conductor hears without being asked: heartbeats, caches, halves, ends and cancels. It only takes notes."""

import time
from typing import assert_never

import structlog

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.conductor.book import Book
from halfmoon.conductor.dispatch import HEADER_SENDER
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.gate import Gate
from halfmoon.conductor.hot import HotIndex
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.members import Members
from halfmoon.conductor.requests import OpenRequests
from halfmoon.scheduling.costs.fitted import Fitted
from halfmoon.schemas import subjects
from halfmoon.schemas.caches import WorkerCache
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Goodbye, Heartbeat, NodeHeartbeat, WorkerHeartbeat
from halfmoon.schemas.requests import RequestCancel
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, RequestTaken, Role, TransferDone


class Ears:
    """Feeds the load view, the index of what is hot, the flights and the open requests."""

    def __init__(
        self,
        bus: Bus,
        conductor: WorkerId,
        members: Members,
        hot: HotIndex,
        fitted: Fitted,
        flights: Flights,
        book: Book,
        gate: Gate,
        requests: OpenRequests,
        instruments: Instruments,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._bus = bus
        self._conductor = conductor
        self._members = members
        self._hot = hot
        self._fitted = fitted
        self._flights = flights
        self._book = book
        self._gate = gate
        self._requests = requests
        self._instruments = instruments
        self._log = log
        self._heartbeats: Decoder[Heartbeat] = Decoder(Heartbeat)
        self._caches: Decoder[WorkerCache] = Decoder(WorkerCache)
        self._splits: Decoder[PrefillHalf | DecodeHalf | TransferDone | RequestCancel] = Decoder(
            PrefillHalf | DecodeHalf | TransferDone | RequestCancel
        )
        self._ends: Decoder[HalfEnded] = Decoder(HalfEnded)
        self._cancels: Decoder[RequestCancel] = Decoder(RequestCancel)
        self._takings: Decoder[RequestTaken] = Decoder(RequestTaken)
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        for subject, hear in (
            (subjects.HEARTBEAT_ALL, self._on_heartbeat),
            (subjects.CACHE_ALL, self._on_cache),
            (subjects.SPLIT_ALL, self._on_split),
            (subjects.ENDED_ALL, self._on_ended),
            (subjects.CANCEL, self._on_cancel),
            (subjects.TAKEN, self._on_taken),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, hear))

    async def close(self) -> None:
        """Idempotent."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def expire_members(self) -> None:
        """To be called every now and then: who is overdue is lost."""
        for worker in self._members.expire():
            self._log.warning("worker lost: its heartbeats stopped", worker=worker)
            self._lost(worker)

    async def _on_heartbeat(self, message: BusMessage) -> None:
        try:
            heartbeat = self._heartbeats.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        ended = self._members.hear(heartbeat, time.monotonic())
        if ended is not None:
            why = "it said goodbye" if isinstance(heartbeat, Goodbye) else "it was restarted"
            self._log.info("worker left", worker=ended, why=why)
            self._lost(ended)
        if isinstance(heartbeat, WorkerHeartbeat):
            self._book.heard(heartbeat, time.monotonic())
            self._gate.heard(heartbeat)
        if isinstance(heartbeat, WorkerHeartbeat):
            self._fitted.hear_worker(heartbeat)
        elif isinstance(heartbeat, NodeHeartbeat):
            self._fitted.hear_node(heartbeat)
        if isinstance(heartbeat, WorkerHeartbeat) and heartbeat.role is not Role.PREFILL:
            self._flights.progress(heartbeat.requests)
            beat = self._members.num_beats(heartbeat.worker)
            for progress in heartbeat.requests:
                request = self._requests.get(progress.request_id)
                if request is not None:
                    request.shown(heartbeat.worker, beat)

    async def _on_cache(self, message: BusMessage) -> None:
        try:
            told = self._caches.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        # Of no other life than the present: whoever ends that one ends what is known of its cache.
        if self._members.life_of(told.worker) == told.started_ns:
            self._hot.hear(told)

    async def _on_split(self, message: BusMessage) -> None:
        if message.headers.get(HEADER_SENDER) == self._conductor:
            return
        worker = WorkerId(subjects.untoken(message.subject.rsplit(".", 1)[-1]))
        try:
            heard = self._splits.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        match heard:
            case PrefillHalf():
                self._flights.sent_prefill(worker, heard)
                self._members.sent_prefill(worker, heard, time.monotonic())
            case DecodeHalf():
                self._flights.sent_decode(worker, heard)
                self._members.sent_decode(worker, heard, time.monotonic())
                self._book.sent_decode(worker, heard, time.monotonic(), is_own=False)
            case TransferDone():
                self._flights.transfer_done(heard.request_id, worker)
                request = self._requests.get(heard.request_id)
                if request is not None:
                    request.prefill_done(worker, heard.transfer_id)
            case RequestCancel():
                return
            case _ as unreachable:
                assert_never(unreachable)

    async def _on_ended(self, message: BusMessage) -> None:
        try:
            ended = self._ends.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        self._members.half_ended(ended)
        self._flights.ended(ended)
        self._instruments.forecasts.ended(ended)
        self._book.ended(ended, time.monotonic())
        self._gate.wake()
        request = self._requests.get(ended.request_id)
        if request is not None:
            request.half_ended(ended)
        if ended.role is not Role.PREFILL:
            self._requests.ended(ended.request_id)

    async def _on_cancel(self, message: BusMessage) -> None:
        try:
            cancel = self._cancels.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        self._requests.cancel(cancel.request_id, cancel.reason)

    async def _on_taken(self, message: BusMessage) -> None:
        try:
            taken = self._takings.decode(message.data, message.headers)
        except Undecodable as error:
            self._undecodable(message, error)
            return
        if taken.conductor != self._conductor:
            self._requests.taken(taken.request_id, taken.num_delivered)

    def _lost(self, worker: WorkerId) -> None:
        self._hot.forget(worker)
        self._fitted.forget(worker)
        self._book.lost(worker)
        self._gate.wake()
        for request in self._requests.on_worker(worker):
            request.changed.set()

    def _undecodable(self, message: BusMessage, error: Undecodable) -> None:
        self._instruments.undecodable.inc()
        self._log.warning("undecodable message", subject=message.subject, error=str(error))
