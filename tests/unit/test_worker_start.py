"""How a worker starts: what it says while loading, and what it refuses to start with."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.service import Decode
from halfmoon.lifecycle import Runtime, StartupError
from halfmoon.prefill.config import PrefillConfig
from halfmoon.prefill.service import Prefill
from halfmoon.schemas.ids import ModelName, WorkerId
from halfmoon.schemas.members import MemberState
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.text import TextCodec
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from halfmoon.worker.engine import build_engine
from support import tiny_tokenizer
from support.exact_engine import ExactEngine
from support.pool_nodes import running_node
from support.wait import until


def runtime_of(broker: MemoryBroker, config: PrefillConfig) -> Runtime[PrefillConfig]:
    return Runtime(
        service="prefill",
        worker_id=WorkerId("prefill-1"),
        config=config,
        bus=MemoryBus(broker),
        telemetry=setup("prefill"),
        metrics=Metrics(),
        log=structlog.stdlib.get_logger("test"),
        started_ns=time.time_ns(),
        fail=lambda reason: None,
    )


class SlowEngine(ExactEngine):
    """Loads when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = asyncio.Event()

    async def start(self, progress: Callable[[float], None] = lambda share: None) -> ModelCard:
        progress(0.25)
        await self.loaded.wait()
        return await super().start(progress)


async def test_heartbeats_say_how_far_the_model_is(tmp_path: Path) -> None:
    broker, engine = MemoryBroker(), SlowEngine()
    async with running_node(broker, tmp_path, "node-a"):
        runtime = runtime_of(broker, PrefillConfig(node="node-a", model=tmp_path, max_requests=3))
        service = Prefill(runtime, engine)
        before = service.heartbeat()
        assert (before.state, before.load_progress, before.card) == (MemberState.LOADING, 0.0, None)
        start = asyncio.create_task(service.start())
        await until(lambda: service.heartbeat().load_progress == 0.25)
        assert service.heartbeat().state is MemberState.LOADING
        engine.loaded.set()
        await start
        beat = service.heartbeat()
        assert (beat.state, beat.load_progress, beat.role) == (MemberState.SERVING, 1.0, Role.PREFILL)
        assert beat.card == engine.card
        assert (beat.node, beat.max_requests) == ("node-a", 3)
        assert (beat.free_tokens, beat.total_tokens) == (4096, 4096)
        await service.stop()
        await service.stop()
        assert service.heartbeat().state is MemberState.DRAINING
        await runtime.bus.close()


async def test_a_stop_while_loading_leaves_nothing(tmp_path: Path) -> None:
    broker, engine = MemoryBroker(), SlowEngine()
    runtime = runtime_of(broker, PrefillConfig(node="node-a", model=tmp_path))
    service = Prefill(runtime, engine)
    start = asyncio.create_task(service.start())
    await until(lambda: service.heartbeat().load_progress == 0.25)
    start.cancel()
    await asyncio.wait([start])
    await service.stop()
    await runtime.bus.close()


async def test_no_kv_tier_is_said_plainly(tmp_path: Path) -> None:
    runtime = runtime_of(MemoryBroker(), PrefillConfig(node="node-x", model=tmp_path, pool_start_timeout_s=0.05))
    service = Prefill(runtime, ExactEngine())
    with pytest.raises(StartupError, match="the kv-tier of node 'node-x' doesn't answer"):
        await service.start()
    await service.stop()
    await runtime.bus.close()


async def test_chunks_that_do_not_fit_the_pool_are_said_plainly(tmp_path: Path) -> None:
    class Wide(ExactEngine):
        @property
        def card(self) -> ModelCard:
            return ModelCard(
                name=ModelName("wide"),
                engine="sim",
                fingerprint="00",
                kv_dtype="float32",
                layout="exact.v1",
                kv_bytes_per_token=4096,
                chunk_tokens=8,
                max_model_tokens=1024,
                vocab_size=402,
            )

    broker = MemoryBroker()
    async with running_node(broker, tmp_path, "node-a"):
        runtime = runtime_of(broker, PrefillConfig(node="node-a", model=tmp_path))
        service = Prefill(runtime, Wide())
        with pytest.raises(StartupError, match=r"has 32,768 bytes, the slots of node 'node-a' have 16,384"):
            await service.start()
        await service.stop()
        await runtime.bus.close()


def test_settings_that_make_no_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no model is set"):
        build_engine(PrefillConfig(node="node-a"))
    with pytest.raises(StartupError, match=r"no engine 'warp'; choose one of torch, vllm, sim"):
        build_engine(PrefillConfig(node="node-a", model=tmp_path, engine="warp"))


async def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    runtime = runtime_of(MemoryBroker(), PrefillConfig(node="node-a"))
    decode_runtime = Runtime(
        service="decode",
        worker_id=WorkerId("decode-1"),
        config=DecodeConfig(node="node-a", model=tmp_path),
        bus=runtime.bus,
        telemetry=runtime.telemetry,
        metrics=Metrics(),
        log=runtime.log,
        started_ns=0,
        fail=lambda reason: None,
    )
    service = Decode(decode_runtime, ExactEngine())
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        await service.start()
    await service.stop()
    await runtime.bus.close()


def test_the_tiny_tokenizer_and_the_engine_agree(tmp_path: Path) -> None:
    """The engine samples single bytes: ids that the tokenizer knows and shows."""
    codec = TextCodec.load(tiny_tokenizer.byte_level(tmp_path / "model"))
    assert sorted(codec.token_bytes(token) for token in range(2, 258)) == [bytes([byte]) for byte in range(256)]
