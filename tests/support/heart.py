"""Heartbeats of a member that a test plays."""

import asyncio

from halfmoon.bus.endpoint import announce
from halfmoon.bus.protocol import Bus
from halfmoon.schemas import subjects
from halfmoon.schemas.members import Heartbeat


class Heart:
    """Beats for a member until it is stopped."""

    def __init__(self, bus: Bus, heartbeat: Heartbeat, every_s: float = 0.1) -> None:
        self._task = asyncio.create_task(self._beat(bus, heartbeat, every_s))

    async def _beat(self, bus: Bus, heartbeat: Heartbeat, every_s: float) -> None:
        while True:
            await announce(bus, subjects.heartbeat(heartbeat.worker), heartbeat)
            await asyncio.sleep(every_s)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
