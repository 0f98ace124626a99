"""Making a node's arena, as its settings say."""

import asyncio
import contextlib
from pathlib import Path

import structlog

from halfmoon.engine.contract import EngineError
from halfmoon.engine.factory import kv_bytes_per_token
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.models.folder import ModelFolderError
from halfmoon.pool.arena import DEFAULT_SHM_DIR, Arena, ArenaError, aligned, arena_path, remove_stale
from halfmoon.schemas.ids import NodeId


async def slot_bytes_of(config: KvTierConfig) -> int:
    """Room for one chunk, in whole pages. Raises `StartupError`."""
    if config.slot_bytes is not None:
        return aligned(config.slot_bytes)
    return aligned(await asyncio.to_thread(_model_chunk_bytes, config))


async def make_arena(
    config: KvTierConfig,
    slot_bytes: int,
    epoch: int,
    undo: contextlib.AsyncExitStack,
    log: structlog.stdlib.BoundLogger,
) -> Arena:
    """A touched arena, which `undo` unlinks; what a dead kv-tier of the node left is gone. Raises `StartupError`."""
    num_slots = config.arena_bytes // slot_bytes
    if num_slots == 0:
        raise StartupError(
            f"arena_bytes is {config.arena_bytes}, less than one slot of {slot_bytes}: raise arena_bytes, "
            "or lower chunk_tokens"
        )
    node = NodeId(config.node)
    path = arena_path(config.shm_dir, node, epoch)
    if config.shm_dir.parent == DEFAULT_SHM_DIR:
        config.shm_dir.mkdir(mode=0o700, exist_ok=True)
        undo.callback(_remove_empty, config.shm_dir)
    try:
        for stale in await asyncio.to_thread(remove_stale, config.shm_dir, node):
            log.info("removed what a dead kv-tier left", path=str(stale))
        making = asyncio.create_task(asyncio.to_thread(Arena.create, path, slot_bytes, num_slots))
        try:
            arena = await asyncio.shield(making)
        finally:
            # Told to stop meanwhile: the thread goes on, and what it makes must not stay behind.
            await asyncio.wait([making])
            if making.exception() is None:
                undo.callback(making.result().close)
                undo.callback(making.result().unlink)
    except ArenaError as error:
        raise StartupError(str(error)) from None
    return arena


def _model_chunk_bytes(config: KvTierConfig) -> int:
    """Bytes of one chunk of this node's engine and model. Raises `StartupError`."""
    if config.model is None and config.engine != "sim":
        raise StartupError("a slot's size isn't known: set slot_bytes, or model to derive it from")
    try:
        return config.chunk_tokens * kv_bytes_per_token(config.engine, config.model or Path(), config.kv_dtype)
    except (ModelFolderError, EngineError) as error:
        raise StartupError(str(error)) from None


def _remove_empty(folder: Path) -> None:
    """A folder of a system's own goes with the last arena in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
