"""What is known of each request's halves, whichever conductor sent them. Pure.

It is heard, not asked: all conductors hear all halves, heartbeats and ends. So one that gets a dead conductor's
request knows its transfer and tokens already, if it was there; and one that starts afresh knows at least who runs it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfmoon.schemas.ids import RequestId, TransferId, WorkerId
from halfmoon.schemas.members import RequestProgress
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, Role

MAX_FLIGHTS = 20_000


@dataclass(slots=True)
class Flight:
    """One request on its workers."""

    transfer_id: TransferId | None = None
    decode_worker: WorkerId | None = None
    prefill_worker: WorkerId | None = None
    """None where there is no prefill half, or it has ended."""
    attempt: int = 1
    known: list[int] = field(default_factory=list)
    """Completion tokens from the first on, without a gap."""
    cached_tokens: int = 0
    """Prompt tokens that came from the cache, as the decode worker reports them to the client."""


class Flights:
    """Bounded: beyond `MAX_FLIGHTS`, the one that changed longest ago is forgotten. Only a resumption suffers."""

    def __init__(self, max_flights: int = MAX_FLIGHTS) -> None:
        self._flights: OrderedDict[RequestId, Flight] = OrderedDict()
        self._max_flights = max_flights

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, request_id: RequestId) -> Flight | None:
        return self._flights.get(request_id)

    def known(self, request_id: RequestId) -> tuple[int, ...]:
        flight = self._flights.get(request_id)
        return tuple(flight.known) if flight is not None else ()

    def cached_tokens(self, request_id: RequestId) -> int:
        flight = self._flights.get(request_id)
        return flight.cached_tokens if flight is not None else 0

    def sent_decode(self, worker: WorkerId, half: DecodeHalf) -> None:
        flight = self._touch(half.request_id)
        flight.transfer_id = half.transfer_id
        flight.decode_worker = worker
        flight.prefill_worker = half.prefill_worker
        flight.attempt = half.attempt
        if len(half.known) > len(flight.known):
            flight.known = list(half.known)
            flight.cached_tokens = half.cached_tokens

    def sent_prefill(self, worker: WorkerId, half: PrefillHalf) -> None:
        flight = self._touch(half.request_id)
        flight.transfer_id = half.transfer_id
        flight.prefill_worker = worker
        flight.attempt = half.attempt

    def progress(self, requests: Iterable[RequestProgress]) -> None:
        """From a decode worker's heartbeat. Tokens behind a gap are left out: they can be computed again."""
        for progress in requests:
            if not progress.new_tokens:
                continue
            flight = self._touch(progress.request_id)
            begin = progress.num_tokens - len(progress.new_tokens)
            if begin <= len(flight.known) < progress.num_tokens:
                flight.known[begin:] = progress.new_tokens
                flight.cached_tokens = progress.cached_tokens

    def ended(self, ended: HalfEnded) -> None:
        flight = self._flights.get(ended.request_id)
        if flight is None or flight.transfer_id not in (None, ended.transfer_id):
            return
        if ended.role is Role.PREFILL:
            if flight.prefill_worker == ended.worker:
                flight.prefill_worker = None
        elif flight.decode_worker in (None, ended.worker):
            del self._flights[ended.request_id]

    def transfer_done(self, request_id: RequestId, prefill_worker: WorkerId) -> None:
        """Decode has all KV that it gets: what becomes of that prefill worker doesn't matter any more."""
        flight = self._flights.get(request_id)
        if flight is not None and flight.prefill_worker == prefill_worker:
            flight.prefill_worker = None

    def forget(self, request_id: RequestId) -> None:
        self._flights.pop(request_id, None)

    def _touch(self, request_id: RequestId) -> Flight:
        flight = self._flights.get(request_id)
        if flight is None:
            flight = self._flights[request_id] = Flight()
            while len(self._flights) > self._max_flights:
                self._flights.popitem(last=False)
        self._flights.move_to_end(request_id)
        return flight
