"""The class that vLLM loads by name in its own processes. It passes each call on to the side that it is for.

Written against vLLM 0.32 (`vllm/distributed/kv_transfer/kv_connector/v1/base.py`), whose docstrings define when each of
these is called.
"""

import os
import signal
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from halfmoon.engine.vllm.copier import BlockCopier
from halfmoon.engine.vllm.layout import layout_name
from halfmoon.engine.vllm.link import Link
from halfmoon.engine.vllm.messages import Ready
from halfmoon.engine.vllm.metadata import StepMetadata
from halfmoon.engine.vllm.scheduler_side import SchedulerSide
from halfmoon.engine.vllm.worker_side import WorkerSide

SOCKET, CHUNK_TOKENS = "socket", "chunk_tokens"
"""Keys of the connector's extra configuration."""


class HalfmoonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See `halfmoon.engine.vllm`. What it doesn't override, vLLM does by itself."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._link: Link | None = None
        self._worker: WorkerSide | None = None
        self._scheduler = SchedulerSide(self._blocks_of) if role is KVConnectorRole.SCHEDULER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: decode can always compute what it doesn't get."""
        return False

    # In the scheduler's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = self._need_scheduler().num_loadable(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._need_scheduler().allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._need_scheduler().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._need_scheduler().received(connector_output.finished_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._need_scheduler().finished(request.request_id), None

    def _blocks_of(self, request_id: str) -> list[int]:
        return list(self._kv_cache_manager.get_block_ids(request_id)[0])

    # In each rank's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, extra = self._config, self._config.kv_transfer_config
        rank = config.parallel_config.rank
        copier = BlockCopier(kv_caches, self._kv_cache_config.num_blocks, rank)
        block_tokens = config.cache_config.block_size
        self._link = link = Link(extra.get_from_extra_config(SOCKET, ""))
        self._worker = WorkerSide(
            copier,
            link.send,
            chunk_tokens=extra.get_from_extra_config(CHUNK_TOKENS, block_tokens),
            block_tokens=block_tokens,
        )
        link.send(
            Ready(
                rank,
                layout_name(config, copier),
                copier.block_bytes,
                self._kv_cache_config.num_blocks,
                str(copier.dtype).removeprefix("torch."),
            )
        )
        link.start(self._worker.take, _end_process)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads go on from the moment at which a request is bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM schedules a request when its load has been reported."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole chunks are copied when the step is done."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return (set(), set()) if self._worker is None else self._worker.take_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_invalid_blocks()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None:
            self._worker.fence()

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._worker is not None:
            self._worker.close()

    def _need_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("this is the side of a rank; vLLM asks the scheduler's")
        return self._scheduler


def _end_process() -> None:
    """The worker that this serves was killed: nobody else would end vLLM's processes, which hold its memory."""
    os.kill(os.getpid(), signal.SIGTERM)
