"""`rdma` on a machine that can't: says why, and reads nothing."""

from collections.abc import Sequence

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult
from halfmoon.transport.slices import all_failed


class AbsentRdma:
    """Takes the transport's place, so that whoever asks why it isn't used is told."""

    name = "rdma"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def unavailable(self, peer: NodeInfo) -> str | None:
        return self._reason

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[SliceResult]:
        return all_failed(slices, ReadOutcome.UNREACHABLE, self._reason)

    async def close(self) -> None:
        return
