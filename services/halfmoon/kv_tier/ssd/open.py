"""Opening a node's SSD tier, as its settings say."""

import asyncio
import contextlib
from dataclasses import dataclass

import structlog

from halfmoon.eviction import make_policy
from halfmoon.kv_tier.config import KvTierConfig
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.ssd.demotion import Demoter
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import file_bytes
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.ssd.metrics import SsdCollector
from halfmoon.kv_tier.ssd.reads import SsdReader
from halfmoon.kv_tier.ssd.reuse import ReuseMemory, Watermarks
from halfmoon.kv_tier.ssd.store import SsdStore
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, WorkerId
from halfmoon.tracing import Tracer


@dataclass(frozen=True, slots=True)
class OpenSsd:
    """The parts that a service runs: `demoter` as long as the pool lives, once `lower` is attached."""

    lower: LowerTier
    """With what an earlier life left: to be attached to the store once it's known what of it was flushed meanwhile."""
    reader: SsdReader
    demoter: Demoter
    collector: SsdCollector


async def open_ssd(
    config: KvTierConfig,
    store: ChunkStore,
    tracer: Tracer,
    undo: contextlib.AsyncExitStack,
    log: structlog.stdlib.BoundLogger,
    *,
    holder: WorkerId,
) -> OpenSsd | None:
    """Take the directory, and look through it; None where none is set.

    Raises `StartupError`: another node has the directory, or it can't be used.
    """
    if config.ssd_dir is None:
        return None
    slot_bytes = store.arena.slot_bytes
    if config.ssd_bytes < file_bytes(slot_bytes):
        raise StartupError(
            f"ssd_bytes is {config.ssd_bytes}, less than one chunk's file of {file_bytes(slot_bytes)}: raise it, "
            "or set no ssd_dir"
        )
    try:
        quotas = TierBook(Tier.SSD, config.ssd_bytes, config.tenants)
    except ValueError as error:
        raise StartupError(str(error)) from None
    directory = await asyncio.to_thread(SsdDirectory, config.ssd_dir, slot_bytes)
    capacity = config.ssd_bytes // file_bytes(slot_bytes)
    ssd = SsdStore(
        directory,
        lambda: make_policy(config.eviction_policy, capacity, ChunkKey),
        quotas,
        config.ssd_bytes,
        log,
        threads=config.ssd_threads,
        clock_ns=store.clock_ns,
    )
    undo.push_async_callback(ssd.close)
    try:
        found = await ssd.load(config.ssd_max_age_s)
    except OSError as error:
        raise StartupError(f"the SSD tier can't read {config.ssd_dir}: {error.strerror or error}") from None
    lower = LowerTier(ssd, ReuseMemory(store.arena.num_slots, config.ssd_admission), config.promote_within)
    marks = None
    if config.high_watermark is not None and config.low_watermark is not None:
        marks = Watermarks(config.high_watermark, config.low_watermark)
    demoter = Demoter(store, lower, holder=holder, fixed=marks)
    lower.watermarks = lambda: demoter.watermarks
    reader = SsdReader(store, lower, tracer, log, node=NodeId(config.node), holder=holder)
    undo.push_async_callback(reader.close)
    log.info(
        "SSD tier ready",
        ssd_dir=str(config.ssd_dir),
        chunks=len(found),
        direct_io=directory.is_direct,
        removed=dict(ssd.counters.removed),
    )
    return OpenSsd(lower, reader, demoter, SsdCollector(lower.stats))
