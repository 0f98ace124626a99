"""What is known about the system from outside: heartbeats on the bus, and the gateway's `/ready`."""

import asyncio
import http.client
import json

from halfmoon.bus.codec import Decoder
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Goodbye, Heartbeat, MemberState, WorkerHeartbeat

_PROBE_TIMEOUT_S = 2.0
_DECODER = Decoder[Heartbeat](Heartbeat)


class Watch:
    """The last heartbeat of each process."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._subscription: Subscription | None = None
        self.heartbeats: dict[WorkerId, Heartbeat] = {}

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.HEARTBEAT_ALL, self._hear)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def progress(self, name: str) -> float:
        """0: not heard of; 1: serving; in between while a model loads."""
        beat = self.heartbeats.get(WorkerId(name))
        if beat is None or isinstance(beat, Goodbye):
            return 0.0
        if beat.state is MemberState.SERVING:
            return 1.0
        return 0.1 + 0.8 * beat.load_progress if isinstance(beat, WorkerHeartbeat) else 0.5

    async def _hear(self, message: BusMessage) -> None:
        beat = _DECODER.decode(message.data)
        self.heartbeats[beat.worker] = beat


async def ready(port: int) -> tuple[bool, str]:
    """Whether the gateway says that a real generation has passed, and if not, what it waits for."""
    return await asyncio.to_thread(_ask_ready, port)


def _ask_ready(port: int) -> tuple[bool, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status == 200:
            return True, ""
        try:
            return False, str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return False, f"HTTP {answer.status}"
    except OSError:
        return False, "the gateway doesn't listen yet"
    finally:
        connection.close()
