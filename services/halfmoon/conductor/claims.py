"""Whose a request is: asked by decode workers that may have been taken for lost, told by the conductor that owns it."""

import structlog

from halfmoon.bus.endpoint import Endpoint, Envelope, announce, serve
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.members import Members
from halfmoon.conductor.requests import OpenRequests
from halfmoon.conductor.state import RequestState
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, WorkerId
from halfmoon.schemas.splits import HalfClaim, HalfClaimed, RequestRecall
from halfmoon.schemas.wire import Error, ErrorCode

UNDECIDED = Error(code=ErrorCode.BUSY, message="it is not decided yet who goes on with this request; ask again")


class Claims:
    """Of one conductor."""

    def __init__(
        self,
        bus: Bus,
        conductor: WorkerId,
        members: Members,
        requests: OpenRequests,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._bus = bus
        self._conductor = conductor
        self._members = members
        self._requests = requests
        self._log = log
        self._endpoint: Endpoint | None = None

    async def open(self) -> None:
        self._endpoint = await serve(self._bus, subjects.CLAIM, HalfClaim, self._judge)

    async def close(self) -> None:
        """Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.unsubscribe()

    async def recall(self, request_id: RequestId) -> None:
        """Ask whether a decode worker has ended it when nobody heard."""
        try:
            await announce(self._bus, subjects.RECALL, RequestRecall(request_id=request_id, conductor=self._conductor))
        except BusError as error:
            self._log.warning("not asked who has ended a request", request_id=request_id, error=str(error))

    async def _judge(self, claim: HalfClaim, envelope: Envelope) -> HalfClaimed | None:
        """None where another conductor may know. Raises `RemoteError` while it is undecided."""
        request = self._requests.get(claim.request_id)
        if request is None:
            return HalfClaimed(is_held=False) if self._requests.has_ended(claim.request_id) else None
        if request.state is not RequestState.RUNNING:
            raise RemoteError(UNDECIDED)
        if request.decode_worker != claim.worker or request.transfer_id not in (None, claim.transfer_id):
            return HalfClaimed(is_held=False)
        if self._members.life_of(claim.worker) != request.decode_life:
            raise RemoteError(UNDECIDED)
        return HalfClaimed(is_held=request.decode_end is None)
