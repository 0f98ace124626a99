"""Which transport for which peer: the best that both ends offer and that works, then the next for what failed.

`UNREACHABLE` is a path's failure: it is set aside for a while (`health`), and the next one gets the slices that are
left. So that a path that hangs leaves time for the next, it gets half of what is left; what it hasn't read by then goes
on, and counts as half a failure. `STALE` and `REFUSED` are the peer's answers, the same over any other path.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.transport.health import HealthTable, PathHealth
from halfmoon.transport.protocol import ReadOutcome, SliceRead, SliceResult, Transport
from halfmoon.transport.slices import all_failed

_OPEN = (ReadOutcome.UNREACHABLE, ReadOutcome.DEADLINE)
"""What another path may still bring."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Transports that can reach a peer, best first, and why the others can't."""

    usable: tuple[Transport, ...]
    reasons: dict[str, str]


class Paths:
    """A process's ways to its peers. Owns its transports."""

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        health: HealthTable | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`transports` come best first. `jitter` gives numbers in [0, 1)."""
        self.transports = tuple(transports)
        self._health = HealthTable() if health is None else health
        self._clock_ns = clock_ns
        self._jitter = jitter

    def health(self) -> Mapping[tuple[NodeId, str], PathHealth]:
        """What is known of each path that was used, by peer and transport."""
        return self._health.paths()

    def choose(self, peer: NodeInfo) -> Choice:
        """What could be used now."""
        now_ns = self._clock_ns()
        reasons = {
            each.name: reason
            for each in self.transports
            if (reason := each.unavailable(peer)) is not None
            or (reason := self._health.set_aside(peer.node, peer.epoch, each.name, now_ns)) is not None
        }
        return Choice(tuple(each for each in self.transports if each.name not in reasons), reasons)

    async def read(
        self, peer: NodeInfo, lease_id: LeaseId, slices: Sequence[SliceRead], *, deadline_ns: int
    ) -> list[tuple[SliceResult, str]]:
        """Read all slices; for each its result, and the name of the transport that gave it (empty: none could try).

        Raises nothing but `asyncio.CancelledError`; when it has returned or raised, no destination is written to.
        """
        choice = self.choose(peer)
        detail = "; ".join(f"{name}: {reason}" for name, reason in choice.reasons.items()) or "no transport is there"
        results = [(each, "") for each in all_failed(slices, ReadOutcome.UNREACHABLE, detail)]
        for place, transport in enumerate(choice.usable):
            open_ones = [index for index, (result, _) in enumerate(results) if result.outcome in _OPEN]
            now_ns = self._clock_ns()
            if not open_ones or (place and now_ns >= deadline_ns):
                break
            is_last = place == len(choice.usable) - 1
            until_ns = deadline_ns if is_last else now_ns + (deadline_ns - now_ns) // 2
            wanted = [slices[index] for index in open_ones]
            answers = await self.read_over(transport, peer, lease_id, wanted, deadline_ns=until_ns)
            for index, answer in zip(open_ones, answers, strict=True):
                results[index] = (answer, transport.name)
        return results

    async def read_over(
        self,
        transport: Transport,
        peer: NodeInfo,
        lease_id: LeaseId,
        slices: Sequence[SliceRead],
        *,
        deadline_ns: int,
    ) -> list[SliceResult]:
        """Read over this one, whatever is known of it, and learn from how that goes. As `Transport.read`."""
        at = (peer.node, peer.epoch, transport.name)
        self._health.begin(*at)
        started_ns = self._clock_ns()
        try:
            answers = await transport.read(peer, lease_id, slices, deadline_ns=deadline_ns)
        except BaseException:
            self._health.gave_up(*at)
            raise
        now_ns = self._clock_ns()
        elapsed_ns = now_ns - started_ns
        num_bytes = sum(
            len(each.destination)
            for each, answer in zip(slices, answers, strict=True)
            if answer.outcome is ReadOutcome.OK
        )
        by_outcome = {answer.outcome: answer.detail for answer in answers}
        if (reason := by_outcome.get(ReadOutcome.UNREACHABLE)) is not None:
            self._health.failed(*at, reason, now_ns=now_ns, jitter=self._jitter(), num_bytes=num_bytes)
        elif (reason := by_outcome.get(ReadOutcome.DEADLINE)) is not None:
            self._health.timed_out(*at, reason, now_ns=now_ns, elapsed_ns=elapsed_ns, jitter=self._jitter())
        elif by_outcome:
            # Refusals too: the path has carried a question there and an answer back.
            self._health.succeeded(*at, num_bytes=num_bytes, elapsed_ns=elapsed_ns)
        else:
            self._health.gave_up(*at)
        return answers

    async def close(self) -> None:
        """Close the transports. Idempotent."""
        for transport in self.transports:
            await transport.close()
