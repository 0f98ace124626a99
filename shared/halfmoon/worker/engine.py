"""The engine that the settings ask for."""

from halfmoon.engine import factory
from halfmoon.engine.contract import Engine, EngineError
from halfmoon.lifecycle import StartupError
from halfmoon.models import ModelFolderError
from halfmoon.worker.config import WorkerConfig


def build_engine(config: WorkerConfig) -> Engine:
    """Not started yet. Raises `StartupError` where the settings make no engine."""
    if config.model is None:
        raise StartupError("no model is set: HALFMOON_MODEL names a Hugging Face folder, or a GGUF file")
    settings = factory.EngineSettings(
        model=config.model,
        name=config.model_name or (config.model.stem if config.model.is_file() else config.model.name),
        chunk_tokens=config.chunk_tokens,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        kv_tokens=config.kv_tokens,
        block_tokens=config.block_tokens,
        step_tokens=config.step_tokens,
        completion_reserve_tokens=config.completion_reserve_tokens,
        tensor_parallel=config.tensor_parallel,
        vllm_args=config.vllm_args,
        sim_prefill_tokens_per_s=config.sim_prefill_tokens_per_s,
        sim_decode_step_s=config.sim_decode_step_s,
        sim_load_s=config.sim_load_s,
    )
    try:
        return factory.build_engine(config.engine, settings)
    except (EngineError, ModelFolderError) as error:
        raise StartupError(str(error)) from error
