"""What the conductor says to clients: failures, and only where it is its turn (see `state.py`)."""

from halfmoon.bus.codec import CONTENT_TYPES, encode
from halfmoon.bus.protocol import Bus
from halfmoon.conductor.instruments import Instruments
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Encoding, Failed
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE, Error
from halfmoon.tracing import Context, inject


class Speaker:
    def __init__(self, bus: Bus, instruments: Instruments) -> None:
        self._bus = bus
        self._instruments = instruments

    async def fail(
        self, reply: str, encoding: Encoding, request_id: RequestId, error: Error, context: Context | None = None
    ) -> None:
        """Send the terminal message of a request that failed. Raises `BusError`: then nothing was sent."""
        headers = {HEADER_CONTENT_TYPE: CONTENT_TYPES[encoding]}
        if context is not None:
            inject(headers, context)
        await self._bus.publish(reply, encode(Failed(request_id=request_id, error=error), encoding), headers=headers)
        self._instruments.refused(error.code.value)
