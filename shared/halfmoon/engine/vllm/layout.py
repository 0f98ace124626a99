"""The name of a rank's block layout: two engines share chunks only where the names are equal."""

from typing import Any

from halfmoon.engine.vllm.copier import BlockCopier
from halfmoon.engine.vllm.versions import installed, minor_of


def layout_name(config: Any, copier: BlockCopier) -> str:
    """`vllm-0.32.cpu-vec.b128.tp1.3x128x128`: version, kernels, block size, ranks, shape of a block in one layer.

    The version is part of it, since vLLM doesn't promise that its kernels pack blocks tomorrow as they do today.
    """
    _, number = installed() or ("vllm", "0.0")
    major, minor = minor_of(number)
    parallel = config.parallel_config
    ranks = f"tp{parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        ranks += f"pp{parallel.pipeline_parallel_size}"
    shape = "x".join(str(size) for size in copier.shape)
    block = config.cache_config.block_size
    return f"vllm-{major}.{minor}.{_kernels(config, copier)}.b{block}.{ranks}.{shape}"


def _kernels(config: Any, copier: BlockCopier) -> str:
    """What packs a block. On a CPU it is chosen by what the processor has, as vLLM's own attention does."""
    if copier.device.type != "cpu":
        return copier.device.type
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = config.cache_config
    return (
        f"cpu-{_get_attn_isa(copier.dtype, cache.block_size, config.model_config.get_head_size(), cache.cache_dtype)}"
    )
