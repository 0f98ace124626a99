"""Whose a request is: asked by decode workers that may have been taken for lost, told by the conductor that owns it."""

from halfmoon.bus.endpoint import Endpoint, Envelope, serve
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.members import Members
from halfmoon.conductor.requests import OpenRequests
from halfmoon.conductor.state import RequestState
from halfmoon.schemas import subjects
from halfmoon.schemas.splits import HalfClaim, HalfClaimed
from halfmoon.schemas.wire import Error, ErrorCode

UNDECIDED = Error(code=ErrorCode.BUSY, message="it is not decided yet who goes on with this request; ask again")


class Claims:
    """Of one conductor."""

    def __init__(self, bus: Bus, members: Members, requests: OpenRequests, flights: Flights) -> None:
        self._bus = bus
        self._members = members
        self._requests = requests
        self._flights = flights
        self._endpoint: Endpoint | None = None

    async def open(self) -> None:
        self._endpoint = await serve(self._bus, subjects.CLAIM, HalfClaim, self._judge)

    async def close(self) -> None:
        """Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.unsubscribe()

    async def _judge(self, claim: HalfClaim, envelope: Envelope) -> HalfClaimed | None:
        """None where another conductor may know. Raises `RemoteError` while it is undecided."""
        request = self._requests.get(claim.request_id)
        if request is None:
            is_over = self._requests.has_ended(claim.request_id) or (claim.is_repeated and self._is_elsewhere(claim))
            return HalfClaimed(is_held=False) if is_over else None
        if request.state is not RequestState.RUNNING:
            raise RemoteError(UNDECIDED)
        if request.decode_worker != claim.worker or request.transfer_id not in (None, claim.transfer_id):
            return HalfClaimed(is_held=False)
        if self._members.life_of(claim.worker) != request.decode_life:
            raise RemoteError(UNDECIDED)
        return HalfClaimed(is_held=request.decode_end is None)

    def _is_elsewhere(self, claim: HalfClaim) -> bool:
        """Whether a conductor that says nothing now had given it to another worker, or to this one anew."""
        flight = self._flights.get(claim.request_id)
        if flight is None:
            return False
        return flight.decode_worker not in (None, claim.worker) or flight.transfer_id not in (None, claim.transfer_id)
