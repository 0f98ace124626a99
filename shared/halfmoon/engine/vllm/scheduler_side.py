"""The connector in the scheduler's process: which requests load, and what each rank has to know of a step.

A request is loaded once, at its beginning. One that vLLM preempts, or whose load failed, is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfmoon.engine.vllm.metadata import PARAMETERS, Binding, Progress, StepMetadata


@dataclass(slots=True)
class _Tracked:
    seq: int
    num_prompt_tokens: int
    has_sinks: bool
    is_loading: bool
    """Its load isn't over: vLLM keeps the blocks by itself until it is."""


class SchedulerSide:
    def __init__(self, blocks_of: Callable[[str], list[int]]) -> None:
        """`blocks_of(request id)`: the blocks that a request has now."""
        self._blocks_of = blocks_of
        self._tracked: dict[str, _Tracked] = {}
        self._unloaded: dict[str, tuple[int, list[int]]] = {}
        """Requests that got their blocks since the last step, and load nothing into them."""
        self._next = StepMetadata()

    def num_loadable(self, request: Any, num_hot: int) -> int:
        """Tokens behind the hot ones that are to be loaded."""
        parameters = _parameters(request)
        if parameters is None or request.request_id in self._tracked:
            return 0
        target: int = min(parameters["num_loadable"], request.num_tokens)
        return max(0, target - num_hot)

    def allocated(self, request: Any, block_ids: list[int], num_external: int) -> None:
        """A request has its blocks; `num_external` tokens are about to be loaded into them."""
        parameters = _parameters(request)
        if parameters is None or request.request_id in self._tracked:
            return
        seq, request_id = parameters["seq"], request.request_id
        self._tracked[request_id] = _Tracked(
            seq=seq,
            num_prompt_tokens=request.num_prompt_tokens,
            has_sinks=parameters["has_sinks"],
            is_loading=num_external > 0,
        )
        if num_external:
            target = min(parameters["num_loadable"], request.num_tokens)
            self._next.bindings.append(Binding(seq, request_id, block_ids, target - num_external, target))
        else:
            self._unloaded[request_id] = (seq, block_ids)

    def step(self, scheduled: Any) -> StepMetadata:
        """What this step's ranks have to know. `scheduled`: vLLM's SchedulerOutput."""
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        metadata, self._next = self._next, StepMetadata()
        metadata.is_empty = scheduled.total_num_scheduled_tokens == 0
        for request_id, (seq, block_ids) in self._unloaded.items():
            # Computed at once, from behind what was hot.
            num_hot = before.get(request_id, 0)
            metadata.bindings.append(Binding(seq, request_id, block_ids, num_hot, num_hot))
        self._unloaded.clear()
        for request_id, num_computed in before.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.has_sinks and num_computed < tracked.num_prompt_tokens:
                after = num_computed + scheduled.num_scheduled_tokens[request_id]
                metadata.progress.append(Progress(request_id, after, self._blocks_of(request_id)))
        return metadata

    def received(self, request_ids: set[str] | None) -> None:
        """All ranks have ended these requests' loads."""
        for request_id in request_ids or ():
            if request_id in self._tracked:
                self._tracked[request_id].is_loading = False

    def finished(self, request_id: str) -> bool:
        """Whether the request's blocks must stay until every rank has said that it is done with them."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tracked.is_loading or not tracked.has_sinks:
            return False
        self._next.kept.append(request_id)
        return True


def _parameters(request: Any) -> dict[str, Any] | None:
    given = request.kv_transfer_params or {}
    found: dict[str, Any] | None = given.get(PARAMETERS)
    return found
