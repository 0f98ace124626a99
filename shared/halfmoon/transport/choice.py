"""Which transport for which peer: the first that is available, then the next for what could not be reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult, Transport
from halfmoon.transport.slices import all_failed


@dataclass(frozen=True, slots=True)
class Choice:
    """Transports that can reach a peer, best first, and why the others can't."""

    usable: tuple[Transport, ...]
    reasons: dict[str, str]


def choose(transports: Sequence[Transport], peer: NodeInfo) -> Choice:
    """`transports` come best first."""
    reasons = {each.name: reason for each in transports if (reason := each.unavailable(peer)) is not None}
    return Choice(tuple(each for each in transports if each.name not in reasons), reasons)


async def read_by_any(
    transports: Sequence[Transport],
    peer: NodeInfo,
    lease_id: LeaseId,
    slices: Sequence[SliceRead],
    *,
    deadline_ns: int,
) -> list[tuple[SliceResult, str]]:
    """Read all slices; for each its result, and the name of the transport that gave it (empty where none could try)."""
    choice = choose(transports, peer)
    detail = "; ".join(f"{name}: {reason}" for name, reason in choice.reasons.items()) or "no transport is configured"
    results = [(each, "") for each in all_failed(slices, ReadOutcome.UNREACHABLE, detail)]
    for transport in choice.usable:
        open_ones = [index for index, (result, _) in enumerate(results) if result.outcome is ReadOutcome.UNREACHABLE]
        if not open_ones:
            break
        answers = await transport.read(peer, lease_id, [slices[index] for index in open_ones], deadline_ns=deadline_ns)
        for index, answer in zip(open_ones, answers, strict=True):
            results[index] = (answer, transport.name)
    return results
