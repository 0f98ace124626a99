"""The heartbeat of a worker, put together from what it knows of itself."""

import os
from collections.abc import Iterable

from halfmoon.engine.contract import EngineStats
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.measurements import DecodeSample, PrefillSample
from halfmoon.schemas.members import MemberState, RequestProgress, WorkerHeartbeat
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role


class WorkerPulse:
    """The slow-changing part of a heartbeat."""

    def __init__(self, *, worker: WorkerId, role: Role, node: NodeId, started_ns: int, max_requests: int) -> None:
        self.worker = worker
        self.role = role
        self._node = node
        self.started_ns = started_ns
        self._max_requests = max_requests
        self._load_progress = 0.0
        self.state = MemberState.LOADING
        self.card: ModelCard | None = None
        self.orders_seq = 0
        """The last flush that the engine's prefix cache has heard of."""

    def loading(self, progress: float) -> None:
        """The model is loaded to this share, 0 to 1. Never goes back."""
        self._load_progress = max(self._load_progress, min(progress, 1.0))

    def loaded(self, card: ModelCard) -> None:
        """The model is there; whether this worker can serve it is still to be seen."""
        self.card = card
        self._load_progress = 1.0

    def serving(self) -> None:
        self.state = MemberState.SERVING

    def draining(self) -> None:
        self.state = MemberState.DRAINING

    def beat(
        self,
        stats: EngineStats | None,
        *,
        num_running: int = 0,
        num_waiting: int = 0,
        queued_tokens: int = 0,
        requests: Iterable[RequestProgress] = (),
        queued_pairs: float = 0.0,
        context_tokens: int = 0,
        prefills: tuple[PrefillSample, ...] = (),
        decodes: tuple[DecodeSample, ...] = (),
    ) -> WorkerHeartbeat:
        """`stats` None: there is no engine yet."""
        return WorkerHeartbeat(
            worker=self.worker,
            role=self.role,
            node=self._node,
            started_ns=self.started_ns,
            state=self.state,
            load_progress=self._load_progress,
            card=self.card,
            num_running=num_running,
            num_waiting=num_waiting,
            queued_tokens=queued_tokens,
            free_tokens=stats.free_tokens if stats else 0,
            total_tokens=stats.total_tokens if stats else 0,
            max_requests=self._max_requests,
            prefill_tokens_per_s=stats.prefill_tokens_per_s if stats else None,
            decode_step_s=stats.decode_step_s if stats else None,
            requests=tuple(requests),
            pid=os.getpid(),
            queued_pairs=queued_pairs,
            context_tokens=context_tokens,
            prefills=prefills,
            decodes=decodes,
            orders_seq=self.orders_seq,
        )
