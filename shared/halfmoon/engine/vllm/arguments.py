"""What vLLM is started with. Sets the process's environment, which vLLM's own processes inherit."""

import os
import shlex
from typing import Any

from halfmoon.engine.contract import EngineError, ModelUnsupported
from halfmoon.engine.vllm.config import VllmEngineConfig
from halfmoon.models import ModelFolder

CPU_KV_TOKENS = 16_384
CPU_BLOCKS = (128, 64, 32)
"""Its kernels want multiples of 32."""
GPU_BLOCK = 16


def prepare_environment(config: VllmEngineConfig) -> None:
    """Before vLLM is imported for the first time. What the user has set stays."""
    threads = config.threads or os.cpu_count() or 1
    for name, value in (
        ("OMP_NUM_THREADS", str(threads)),
        # vLLM binds threads to cores, which ruins whoever shares them.
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
    ):
        os.environ.setdefault(name, value)
    # It would override the size that is set below.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def block_tokens_of(config: VllmEngineConfig, *, on_cpu: bool) -> int:
    """Raises `EngineError` where chunks aren't whole blocks."""
    chunk = config.chunk_tokens
    block = config.block_tokens
    if block is None:
        block = next((size for size in CPU_BLOCKS if chunk % size == 0), CPU_BLOCKS[-1]) if on_cpu else GPU_BLOCK
    if chunk % block:
        raise EngineError(
            f"chunk_tokens is {chunk}, vLLM's blocks have {block} tokens: chunks are whole blocks, so set chunk_tokens "
            f"to a multiple of {block}, or block_tokens to a divisor of {chunk}"
        )
    return block


def engine_arguments(config: VllmEngineConfig, folder: ModelFolder, connector: dict[str, Any], events: str) -> Any:
    """vLLM's `AsyncEngineArgs`. Raises `EngineError`, `ModelUnsupported`."""
    if folder.is_gguf:
        raise ModelUnsupported("the vllm engine takes Hugging Face folders, not GGUF files: convert it, or use torch")
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    block_tokens = block_tokens_of(config, on_cpu=on_cpu)
    arguments = _users(config, AsyncEngineArgs, folder)
    arguments.served_model_name = [config.name]
    arguments.skip_tokenizer_init = True
    arguments.block_size = block_tokens
    arguments.enable_prefix_caching = True
    arguments.tensor_parallel_size = config.tensor_parallel
    arguments.disable_log_stats = True
    arguments.enable_log_requests = False
    arguments.async_scheduling = False
    arguments.disable_hybrid_kv_cache_manager = True
    arguments.logits_processors = ["halfmoon.engine.vllm.sampling:CounterSampling"]
    arguments.kv_transfer_config = KVTransferConfig(
        kv_connector="HalfmoonConnector",
        kv_connector_module_path="halfmoon.engine.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=connector,
    )
    arguments.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=events)
    if config.dtype != "auto" or on_cpu:
        arguments.dtype = "float32" if config.dtype == "auto" else config.dtype
    kv_tokens = config.kv_tokens
    if on_cpu:
        kv_tokens = kv_tokens or CPU_KV_TOKENS
        arguments.enforce_eager = True
        arguments.max_num_seqs = 64
        arguments.max_num_batched_tokens = max(config.step_tokens or config.chunk_tokens, arguments.max_num_seqs)
        block_bytes = block_tokens * folder.geometry.kv_bytes_per_token(arguments.dtype) // config.tensor_parallel
        # One block more: vLLM keeps the first for itself.
        arguments.kv_cache_memory_bytes = (-(-kv_tokens // block_tokens) + 1) * block_bytes
    else:
        if config.step_tokens is not None:
            arguments.max_num_batched_tokens = config.step_tokens
        if kv_tokens is not None:
            arguments.num_gpu_blocks_override = -(-kv_tokens // block_tokens) + 1
    limit = folder.geometry.max_model_tokens
    arguments.max_model_len = min(limit, kv_tokens or limit, arguments.max_model_len or limit)
    return arguments


def _users(config: VllmEngineConfig, engine_args: Any, folder: ModelFolder) -> Any:
    """vLLM's defaults, changed by the flags that the user gives. Raises `EngineError` where they can't be read."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = engine_args.add_cli_args(FlexibleArgumentParser(prog="vllm_args", add_help=False, exit_on_error=False))
    try:
        # The model at once: without one, vLLM looks its default up on the network.
        flags = [*shlex.split(config.vllm_args), "--model", str(folder.path)]
        return engine_args.from_cli_args(parser.parse_args(flags))
    except SystemExit as error:
        raise EngineError(f"vllm_args {config.vllm_args!r} are no flags that vLLM knows") from error
    except Exception as error:
        raise EngineError(f"vllm_args {config.vllm_args!r} can't be read: {error}") from error
