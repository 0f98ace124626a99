"""Settings of the vLLM engine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineConfig:
    model: Path
    name: str
    chunk_tokens: int = 256
    dtype: str = "auto"
    """`auto`: float32 on a CPU, what the model was saved in on a GPU."""
    threads: int | None = None
    """OpenMP threads of each rank, on a CPU. None: one per core."""
    kv_tokens: int | None = None
    """Size of the paged KV. None: 16,384 on a CPU; on a GPU, what its memory leaves."""
    block_tokens: int | None = None
    """Tokens per block of the paged KV. None: on a CPU the largest of 128, 64 and 32 that divides a chunk; else 16."""
    step_tokens: int | None = None
    """Tokens in one step at most. None: a chunk on a CPU, so that each is handed over at once; else vLLM's choice."""
    completion_reserve_tokens: int | None = 256
    """Room claimed for a completion before it begins, at most. What comes beyond is vLLM's to find: it preempts a
    sequence, and computes that again later. None: claim all that may be generated."""
    tensor_parallel: int = 1
    """Ranks that hold a share of each layer."""
    vllm_args: str = ""
    """More of vLLM's own command-line flags. Those that this engine sets itself win."""
