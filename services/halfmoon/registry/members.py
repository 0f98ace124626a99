"""Who is there: the member table. Pure: it is told the time, and returns what should be announced.

Every registry keeps one from the heartbeats that all of them hear, so that a new leader knows the cluster when it takes
over; only the leader announces and records.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from halfmoon.lifecycle.listening import ListeningClock
from halfmoon.machine import Machine
from halfmoon.registry.state import MEMBER_TABLE, PRESENT, MemberPhase, MemberSign
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.members import (
    MEMBER_LOST_AFTER_S,
    Goodbye,
    Heartbeat,
    NodeHeartbeat,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.registry import MemberEvent, MemberJoined, MemberLost

LATE_AFTER_S = MEMBER_LOST_AFTER_S / 2
FORGET_AFTER_S = 60.0
MAX_MEMBERS = 10_000

LiveHeartbeat: TypeAlias = WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat


@dataclass(slots=True)
class Member:
    """One process, as last heard."""

    machine: Machine[MemberPhase, MemberSign]
    heartbeat: LiveHeartbeat
    heard_s: float
    """Of the last heartbeat, on the table's clock."""
    fresh: bool = True
    """Heard since the last `take_fresh`."""

    @property
    def pool(self) -> NodeId | None:
        """The node whose pool this member is. None for all others: a worker's death takes no pool with it."""
        return self.heartbeat.node if isinstance(self.heartbeat, NodeHeartbeat) else None


class MemberTable:
    """All members, by worker id. At most `MAX_MEMBERS`; heartbeats of more are counted in `refused` and not kept."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, Member] = {}
        self._clock = ListeningClock()
        self.refused = 0

    @property
    def listened_s(self) -> float:
        """For how long, in all, this registry has been able to hear."""
        return self._clock.listened_s

    def hear(self, heartbeat: Heartbeat, now_s: float) -> tuple[MemberEvent, ...]:
        """Take in one heartbeat."""
        heard_s = self._clock.hear(now_s)
        member = self._members.get(heartbeat.worker)
        if isinstance(heartbeat, Goodbye):
            return self._part(member)
        if member is None:
            if len(self._members) >= MAX_MEMBERS:
                self.refused += 1
                return ()
            member = Member(Machine(MEMBER_TABLE, MemberPhase.UNKNOWN), heartbeat, heard_s)
            self._members[heartbeat.worker] = member
        phase, before = member.machine.state, member.heartbeat
        if phase is MemberPhase.LEFT and heartbeat.started_ns <= before.started_ns:
            return ()
        if heartbeat.started_ns < before.started_ns:
            return ()
        restarted = phase in PRESENT and heartbeat.started_ns > before.started_ns
        events: list[MemberEvent] = []
        if restarted:
            events.append(self._lost(member, "restarted"))
        member.machine.fire(MemberSign.HEARD)
        member.heartbeat, member.heard_s, member.fresh = heartbeat, heard_s, True
        if restarted or phase not in PRESENT:
            events.append(MemberJoined(worker=heartbeat.worker, node=member.pool))
        return tuple(events)

    def recall(self, heartbeats: tuple[LiveHeartbeat, ...]) -> None:
        """Members that an earlier leader had recorded. Those not heard here yet have until they are overdue."""
        for heartbeat in heartbeats:
            if heartbeat.worker not in self._members and len(self._members) < MAX_MEMBERS:
                machine = Machine(MEMBER_TABLE, MemberPhase.UNKNOWN)
                member = Member(machine, heartbeat, self.listened_s, fresh=False)
                member.machine.fire(MemberSign.RECALLED)
                self._members[heartbeat.worker] = member

    def judge(self) -> tuple[MemberEvent, ...]:
        """Who is late, and who is lost. Call it a few times a second."""
        events: list[MemberEvent] = []
        for worker, member in list(self._members.items()):
            silent_s = self.listened_s - member.heard_s
            if silent_s > FORGET_AFTER_S and member.machine.state not in PRESENT:
                del self._members[worker]
                continue
            if silent_s > LATE_AFTER_S and member.machine.state is MemberPhase.ALIVE:
                member.machine.fire(MemberSign.LATE)
            if silent_s > MEMBER_LOST_AFTER_S and member.machine.state is MemberPhase.SUSPECT:
                member.machine.fire(MemberSign.OVERDUE)
                events.append(self._lost(member, f"no heartbeat for {silent_s:.1f} s"))
        return tuple(events)

    def announce_all(self) -> tuple[MemberEvent, ...]:
        """All that is known, as events: what a new leader says, since its predecessor may not have."""
        return tuple(
            MemberJoined(worker=worker, node=member.pool)
            if member.machine.state in PRESENT
            else self._lost(member, member.machine.state.value)
            for worker, member in self._members.items()
        )

    def take_fresh(self) -> tuple[LiveHeartbeat, ...]:
        """The heartbeats that came since the last call, one a member, without per-request progress."""
        fresh = []
        for member in self._members.values():
            if member.fresh and member.machine.state in PRESENT:
                fresh.append(_compact(member.heartbeat))
            member.fresh = False
        return tuple(fresh)

    def present(self) -> list[LiveHeartbeat]:
        """The last heartbeat of everybody who is there."""
        return [member.heartbeat for member in self._members.values() if member.machine.state in PRESENT]

    def phase(self, worker: WorkerId) -> MemberPhase:
        member = self._members.get(worker)
        return member.machine.state if member is not None else MemberPhase.UNKNOWN

    def nodes_present(self) -> dict[NodeId, int]:
        """Pools that are there, with their epochs; the newest, while a dead life of the same node isn't overdue yet."""
        present: dict[NodeId, int] = {}
        for member in self._members.values():
            if isinstance(member.heartbeat, NodeHeartbeat) and member.machine.state in PRESENT:
                node = member.heartbeat.node
                present[node] = max(member.heartbeat.epoch, present.get(node, 0))
        return present

    def nodes_gone(self) -> frozenset[NodeId]:
        """Pools that were there and are not any more."""
        return frozenset(
            member.heartbeat.node
            for member in self._members.values()
            if isinstance(member.heartbeat, NodeHeartbeat) and member.machine.state not in PRESENT
        ) - frozenset(self.nodes_present())

    def count(self) -> dict[MemberPhase, int]:
        counts = dict.fromkeys(MemberPhase, 0)
        for member in self._members.values():
            counts[member.machine.state] += 1
        return counts

    def _part(self, member: Member | None) -> tuple[MemberEvent, ...]:
        if member is None or not member.machine.can(MemberSign.GOODBYE):
            return ()
        announce = member.machine.state in PRESENT
        member.machine.fire(MemberSign.GOODBYE)
        return (self._lost(member, "left"),) if announce else ()

    def _lost(self, member: Member, reason: str) -> MemberLost:
        """Names the node only where its pool went too: not where another life of the pool is there already."""
        pool = member.pool
        beats = (other.heartbeat for other in self._members.values() if other.machine.state in PRESENT)
        succeeded = any(
            isinstance(beat, NodeHeartbeat) and beat.node == pool and beat.worker != member.heartbeat.worker
            for beat in beats
        )
        return MemberLost(worker=member.heartbeat.worker, node=None if succeeded else pool, reason=reason)


def _compact(heartbeat: LiveHeartbeat) -> LiveHeartbeat:
    if isinstance(heartbeat, WorkerHeartbeat) and heartbeat.requests:
        return msgspec.structs.replace(heartbeat, requests=())
    return heartbeat
