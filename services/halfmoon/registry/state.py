"""Life cycles, as data: of a member as the registry sees it, and of the registry itself.

member   unknown → alive ⇄ suspect → lost      a heartbeat that is late, then overdue
                      └→ left ←┘     └→ alive  a clean goodbye; a return
role     standby ⇄ leading → stopped
"""

from enum import StrEnum

from halfmoon.machine import Table


class MemberPhase(StrEnum):
    UNKNOWN = "unknown"
    ALIVE = "alive"
    SUSPECT = "suspect"
    """Late. Still listed, and nothing of it is given up."""
    LOST = "lost"
    LEFT = "left"


class MemberSign(StrEnum):
    HEARD = "heard"
    RECALLED = "recalled"
    """Another leader had recorded it; this registry has not heard it yet."""
    LATE = "late"
    OVERDUE = "overdue"
    GOODBYE = "goodbye"


MEMBER_TABLE: Table[MemberPhase, MemberSign] = {
    (MemberPhase.UNKNOWN, MemberSign.HEARD): MemberPhase.ALIVE,
    (MemberPhase.UNKNOWN, MemberSign.RECALLED): MemberPhase.SUSPECT,
    (MemberPhase.ALIVE, MemberSign.HEARD): MemberPhase.ALIVE,
    (MemberPhase.ALIVE, MemberSign.LATE): MemberPhase.SUSPECT,
    (MemberPhase.ALIVE, MemberSign.GOODBYE): MemberPhase.LEFT,
    (MemberPhase.SUSPECT, MemberSign.HEARD): MemberPhase.ALIVE,
    (MemberPhase.SUSPECT, MemberSign.OVERDUE): MemberPhase.LOST,
    (MemberPhase.SUSPECT, MemberSign.GOODBYE): MemberPhase.LEFT,
    (MemberPhase.LOST, MemberSign.HEARD): MemberPhase.ALIVE,
    (MemberPhase.LOST, MemberSign.GOODBYE): MemberPhase.LEFT,
    (MemberPhase.LEFT, MemberSign.HEARD): MemberPhase.ALIVE,
}

PRESENT = frozenset({MemberPhase.ALIVE, MemberPhase.SUSPECT})


class Role(StrEnum):
    STANDBY = "standby"
    """Answers lookups; another registry follows the stream, or none does."""
    LEADING = "leading"
    STOPPED = "stopped"


class RoleEvent(StrEnum):
    ELECTED = "elected"
    DEPOSED = "deposed"
    """The lease ran out or could not be renewed in time, or somebody else's key stands in etcd."""
    STOP = "stop"


ROLE_TABLE: Table[Role, RoleEvent] = {
    (Role.STANDBY, RoleEvent.ELECTED): Role.LEADING,
    (Role.LEADING, RoleEvent.DEPOSED): Role.STANDBY,
    (Role.STANDBY, RoleEvent.STOP): Role.STOPPED,
    (Role.LEADING, RoleEvent.STOP): Role.STOPPED,
}
