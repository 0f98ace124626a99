"""What the heartbeats say about who can serve. Pure: it is told the time."""

from dataclasses import dataclass

from halfmoon.lifecycle.listening import ListeningClock
from halfmoon.schemas.ids import ModelName, WorkerId
from halfmoon.schemas.members import (
    MEMBER_LOST_AFTER_S,
    Goodbye,
    Heartbeat,
    MemberState,
    NodeHeartbeat,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role

MAX_MEMBERS = 10_000


@dataclass(frozen=True, slots=True)
class Serving:
    """Whether one model can be served now, and by which lives of which processes."""

    card: ModelCard | None
    missing: tuple[str, ...]
    """What it takes and isn't there, in words; empty where requests can be taken."""
    members: frozenset[tuple[WorkerId, int]]
    """Who is there, each with its start time: another life of a worker is another member."""


class Cluster:
    """The last heartbeat of each conductor and worker."""

    def __init__(self) -> None:
        self._clock = ListeningClock()
        self._heard: dict[WorkerId, tuple[WorkerHeartbeat | ServiceHeartbeat, float]] = {}
        """With the time of that clock."""

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        at_s = self._clock.hear(now_s)
        match heartbeat:
            case Goodbye():
                self._heard.pop(heartbeat.worker, None)
            case WorkerHeartbeat() | ServiceHeartbeat():
                if heartbeat.worker in self._heard or len(self._heard) < MAX_MEMBERS:
                    self._heard[heartbeat.worker] = (heartbeat, at_s)
            case NodeHeartbeat():
                # A pool that is away costs reuse, not service.
                return

    def serving(self, model: ModelName) -> Serving:
        """The state of one model. Members that were silent for `MEMBER_LOST_AFTER_S`, while others were heard, are
        forgotten."""
        listened_s = self._clock.listened_s
        lost = [worker for worker, (_, at_s) in self._heard.items() if listened_s - at_s > MEMBER_LOST_AFTER_S]
        for worker in lost:
            del self._heard[worker]
        present: set[str] = set()
        loading: set[str] = set()
        members: set[tuple[WorkerId, int]] = set()
        card: ModelCard | None = None
        for heartbeat, _ in self._heard.values():
            if isinstance(heartbeat, ServiceHeartbeat):
                kinds = {"conductor"} if heartbeat.service == "conductor" else set()
            elif heartbeat.card is None or heartbeat.card.name == model:
                kinds = _kinds(heartbeat.role)
                card = card or heartbeat.card
            else:
                kinds = set()
            if kinds and heartbeat.state is MemberState.SERVING:
                present |= kinds
                members.add((heartbeat.worker, heartbeat.started_ns))
            elif kinds and heartbeat.state is MemberState.LOADING:
                loading |= kinds
        missing = tuple(
            f"{kind} (loading)" if kind in loading else kind
            for kind in ("conductor", "prefill worker", "decode worker")
            if kind not in present
        )
        return Serving(card=card, missing=missing, members=frozenset(members))


def _kinds(role: Role) -> set[str]:
    match role:
        case Role.PREFILL:
            return {"prefill worker"}
        case Role.DECODE:
            return {"decode worker"}
        case Role.COLOCATED:
            return {"prefill worker", "decode worker"}
