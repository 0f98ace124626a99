"""Settings of the torch engine."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineConfig:
    model: Path
    name: str
    chunk_tokens: int = 256
    device: str = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`."""
    dtype: str = "auto"
    """`auto`: float32 on a CPU, bfloat16 on a GPU."""
    threads: int | None = None
    """CPU threads that compute; None leaves torch's choice."""
    kv_tokens: int = 16_384
    """Size of the paged KV."""
    block_tokens: int = 16
    """KV is handed out in blocks of this many tokens."""
    prefill_step_tokens: int = 256
    """Prompt tokens in one step at most."""
    mixed_step_tokens: int = 64
    """The same while others decode, so that they don't wait long."""
    max_batch: int = 64
    """Sequences that decode in one step at most."""

    def resolve_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def resolve_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.float32 if self.resolve_device().type == "cpu" else torch.bfloat16
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]
