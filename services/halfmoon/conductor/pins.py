"""What is pinned, as runs of chunks: pools keep the copies that they have, conductors see that there are enough."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

import structlog

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError
from halfmoon.bus.protocol import Bus
from halfmoon.scheduling.replication import Run
from halfmoon.schemas import subjects
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.registry import LookedUp, Lookup, Orders, StandingOrders

EVERY_S = 5.0
_LOOKUP_KEYS = 256
_TIMEOUT_S = 2.0


class PinWatch:
    """Asks the registry when nodes tell of orders that it hasn't seen, and for what is known of no pinned chunk yet.

    `run` is its one task, cancelled by its owner.
    """

    def __init__(self, bus: Bus, log: structlog.stdlib.BoundLogger, latest: Callable[[], int]) -> None:
        """`latest`: the highest number of an order that any node has carried out."""
        self._bus = bus
        self._log = log
        self._latest = latest
        self._seq = 0
        self._metas: dict[ChunkKey, ChunkMeta | None] = {}
        """Of the pinned chunks; None of one that no node has, or had when it was asked for."""
        self.runs: tuple[Run, ...] = ()

    async def run(self, every_s: float = EVERY_S) -> None:
        """Never returns."""
        while True:
            try:
                await self.look()
            except BusError as error:
                self._log.info("what is pinned isn't known; asking again", error=str(error))
            await asyncio.sleep(every_s)

    async def look(self) -> None:
        """Raises `BusError`."""
        if self._latest() > self._seq:
            asked = Orders(after=self._latest())
            told = await call(self._bus, subjects.registry("orders"), asked, StandingOrders, timeout_s=_TIMEOUT_S)
            self._metas = {pin.key: self._metas.get(pin.key) for pin in told.pins}
            self._seq = told.seq
        unknown = [key for key, meta in self._metas.items() if meta is None]
        for start in range(0, len(unknown), _LOOKUP_KEYS):
            keys = tuple(unknown[start : start + _LOOKUP_KEYS])
            found = await call(
                self._bus, subjects.registry("lookup"), Lookup(keys=keys), LookedUp, timeout_s=_TIMEOUT_S
            )
            for key, placements in zip(keys, found.placements, strict=True):
                if placements:
                    self._metas[key] = placements[0].chunk
        self.runs = runs_of({key: meta for key, meta in self._metas.items() if meta is not None})


def runs_of(metas: Mapping[ChunkKey, ChunkMeta]) -> tuple[Run, ...]:
    """These chunks as runs from the first one pinned to each that no other pinned one follows."""
    followed = {meta.parent for meta in metas.values()}
    return tuple(
        Run(tuple(_back_from(key, metas))[::-1], meta.num_tokens, meta.num_bytes)
        for key, meta in metas.items()
        if key not in followed
    )


def _back_from(key: ChunkKey, metas: Mapping[ChunkKey, ChunkMeta]) -> Iterable[ChunkKey]:
    at: ChunkKey | None = key
    while at is not None and at in metas:
        yield at
        at = metas[at].parent
