"""Engines by name. Imports only the one that is asked for: `sim` needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from halfmoon.engine.contract import Engine, EngineError
from halfmoon.models import ModelFolder, ModelFolderError

DEFAULT_KV_TOKENS = 16_384
ENGINES = ("torch", "vllm", "sim")


class EngineUnavailable(EngineError):
    """There is no such engine, or what it needs isn't installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What every engine is told; each takes what concerns it."""

    model: Path
    name: str
    """Under which users ask for the model."""
    chunk_tokens: int
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    kv_tokens: int | None = None
    """None: 16,384; for `vllm` on a GPU, what its memory leaves."""
    block_tokens: int | None = None
    step_tokens: int | None = None
    completion_reserve_tokens: int | None = 256
    tensor_parallel: int = 1
    vllm_args: str = ""
    sim_prefill_tokens_per_s: float = 20_000.0
    sim_decode_step_s: float = 0.02
    sim_load_s: float = 0.0


def build_engine(engine: str, settings: EngineSettings) -> Engine:
    """An engine that is yet to be started. Raises `EngineUnavailable`, `ModelFolderError`."""
    if engine == "sim":
        from halfmoon.engine.sim import SimEngine, SimEngineConfig

        return SimEngine(
            SimEngineConfig(
                model=settings.model,
                name=settings.name,
                chunk_tokens=settings.chunk_tokens,
                kv_tokens=settings.kv_tokens or DEFAULT_KV_TOKENS,
                prefill_tokens_per_s=settings.sim_prefill_tokens_per_s,
                decode_step_s=settings.sim_decode_step_s,
                load_s=settings.sim_load_s,
            )
        )
    if engine == "torch":
        try:
            from halfmoon.engine.torch import TorchEngine, TorchEngineConfig
        except ImportError as error:
            raise EngineUnavailable(
                f"the torch engine can't be loaded ({error}): `pip install 'halfmoon[torch]'`"
            ) from error
        return TorchEngine(
            TorchEngineConfig(
                model=settings.model,
                name=settings.name,
                chunk_tokens=settings.chunk_tokens,
                device=settings.device,
                dtype=settings.dtype,
                threads=settings.threads,
                kv_tokens=settings.kv_tokens or DEFAULT_KV_TOKENS,
            )
        )
    if engine == "vllm":
        from halfmoon.engine.vllm import VllmEngine, VllmEngineConfig

        return VllmEngine(
            VllmEngineConfig(
                model=settings.model,
                name=settings.name,
                chunk_tokens=settings.chunk_tokens,
                dtype=settings.dtype,
                threads=settings.threads,
                kv_tokens=settings.kv_tokens,
                block_tokens=settings.block_tokens,
                step_tokens=settings.step_tokens,
                completion_reserve_tokens=settings.completion_reserve_tokens,
                tensor_parallel=settings.tensor_parallel,
                vllm_args=settings.vllm_args,
            )
        )
    raise EngineUnavailable(f"there is no engine {engine!r}; choose one of {', '.join(ENGINES)}")


def kv_bytes_per_token(engine: str, model: Path, dtype: str) -> int:
    """Size of one token's KV as the engine lays it out. `dtype` `auto` is taken for a CPU: float32.

    Raises `ModelFolderError`, `EngineUnavailable`.
    """
    if engine == "sim":
        from halfmoon.engine.sim.tokens import KV_BYTES_PER_TOKEN

        return KV_BYTES_PER_TOKEN
    if engine not in ("torch", "vllm"):
        raise EngineUnavailable(f"there is no engine {engine!r}; choose one of {', '.join(ENGINES)}")
    try:
        return ModelFolder.open(model).geometry.kv_bytes_per_token("float32" if dtype == "auto" else dtype)
    except ValueError as error:
        raise ModelFolderError(str(error)) from None
