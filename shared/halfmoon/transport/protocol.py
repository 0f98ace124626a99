"""The `Transport` protocol: read a batch of slices of a peer's arena into one's own.

Pull only. The reader names slots that it holds a lease on, and where their bytes go; the peer, dead or alive, can't
write into the reader's memory on its own. Outcomes are per slice: one slot that has gone stale doesn't fail the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo


class ReadOutcome(StrEnum):
    OK = "ok"
    STALE = "stale"
    """The slot has another generation: what was leased is gone."""
    REFUSED = "refused"
    """The peer says that no live lease covers this slot, or that the range is outside it."""
    UNREACHABLE = "unreachable"
    """The peer can't be reached, or went away during the read."""
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class SliceRead:
    """One slice to read."""

    slot: int
    generation: int
    offset: int
    """Within the slot, in bytes."""
    destination: memoryview
    """Writable; its length is the number of bytes to read. Page-aligned memory is fastest. The caller keeps it valid,
    and to itself, until `read` has returned or its cancellation has been delivered."""


@dataclass(frozen=True, slots=True)
class SliceResult:
    outcome: ReadOutcome
    started_ns: int
    """Unix time at which the bytes of this slice began to move (or the attempt was made)."""
    finished_ns: int
    detail: str = ""


class Transport(Protocol):
    """A way to read. One instance serves all peers of a process; connections are its own affair."""

    @property
    def name(self) -> str:
        """`shm`, `tcp` or `rdma`."""
        ...

    def unavailable(self, peer: NodeInfo) -> str | None:
        """Why this transport can't be used with `peer`, in a sentence; None where it can."""
        ...

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        """Read all slices; the results are in the same order. Raises nothing but `asyncio.CancelledError`.

        When it has returned or raised, nothing writes to any destination any more.
        """
        ...

    async def close(self) -> None:
        """Let go of all connections and mappings. Idempotent."""
        ...
