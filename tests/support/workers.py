"""A prefill and a decode worker on two nodes, in this process: real pools and transports, the engine that checks KV."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.memory import MemoryBroker
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.chunks.keys import chunk_keys
from halfmoon.config import CommonConfig
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.service import Decode
from halfmoon.engine.contract import Engine
from halfmoon.lifecycle import Runtime
from halfmoon.prefill.config import PrefillConfig
from halfmoon.prefill.service import Prefill
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.kv_tier import ChunkSource, WantedChunk
from halfmoon.schemas.requests import Encoding, Failed, Finished, RequestCancel, Sampling, TokenEvent, Tokens
from halfmoon.schemas.splits import DecodeHalf, HalfAccepted, HalfEnded, PrefillHalf, Role
from halfmoon.tracing import Telemetry, setup
from halfmoon.tracing.metrics import Metrics
from support import tiny_tokenizer
from support.buses import BusMaker
from support.exact_engine import CHUNK_TOKENS, KV_BYTES_PER_TOKEN, ExactEngine
from support.pool_nodes import Node, attached_to, running_node
from support.wait import until

C = TypeVar("C", bound=CommonConfig)

CONDUCTOR = WorkerId("conductor-1")
PREFILL = WorkerId("prefill-1")
DECODE = WorkerId("decode-1")
ROOT = b"r" * 32
SEED = 7
UNHEARD: dict[str, object] = {"listen_first_s": 0.0}
"""No other workers are there: nobody need be waited for."""


@dataclass
class Reader:
    """Who hears the token events of one request."""

    events: list[TokenEvent] = field(default_factory=list)
    messages: list[BusMessage] = field(default_factory=list)

    @property
    def terminals(self) -> list[Finished | Failed]:
        return [event for event in self.events if isinstance(event, Finished | Failed)]

    @property
    def tokens(self) -> list[int]:
        """All tokens in order; fails where they are not numbered without gaps or repeats."""
        tokens: list[int] = []
        first: int | None = None
        for event in self.events:
            if isinstance(event, Tokens):
                first = event.seq if first is None else first
                assert event.seq == first + len(tokens)
                tokens += event.tokens
        return tokens

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens | Finished))

    async def terminal(self, timeout_s: float = 20.0) -> Finished | Failed:
        await until(lambda: self.terminals, timeout_s, what="a terminal event")
        return self.terminals[0]

    async def finished(self) -> Finished:
        terminal = await self.terminal()
        assert isinstance(terminal, Finished), terminal
        return terminal

    async def failed(self) -> Failed:
        terminal = await self.terminal()
        assert isinstance(terminal, Failed), terminal
        return terminal


async def listen_on(bus: Bus, reply: str) -> Reader:
    reader = Reader()
    decoder: Decoder[TokenEvent] = Decoder(TokenEvent)

    async def hear(message: BusMessage) -> None:
        reader.messages.append(message)
        reader.events.append(decoder.decode(message.data, message.headers))

    await bus.subscribe(reply, hear)
    return reader


@dataclass
class Cluster:
    bus: Bus
    node_a: Node
    node_b: Node
    prefill: Prefill
    decode: Decode
    prefill_engine: ExactEngine
    decode_engine: ExactEngine
    prefill_spans: InMemorySpanExporter
    decode_spans: InMemorySpanExporter
    telemetries: tuple[Telemetry, ...]
    failures: list[str]
    ended: list[HalfEnded] = field(default_factory=list)
    beating: set[WorkerId] = field(default_factory=set)
    _number: int = 0

    @property
    def sources(self) -> tuple[ChunkSource, ChunkSource]:
        return self.node_a.source, self.node_b.source

    async def listen(self, reply: str) -> Reader:
        return await listen_on(self.bus, reply)

    def halves(
        self,
        prompt: Sequence[int],
        *,
        reuse: Sequence[tuple[ChunkSource, ...]] = (),
        sampling: Sampling | None = None,
        timeout_s: float = 60.0,
        prefill_worker: WorkerId | None = PREFILL,
        known: Sequence[int] = (),
        encoding: Encoding = Encoding.MSGPACK,
    ) -> tuple[PrefillHalf, DecodeHalf]:
        self._number += 1
        request_id, transfer_id = RequestId(f"req-{self._number}"), TransferId(f"xfer-{self._number}")
        deadline_ns = time.time_ns() + int(timeout_s * 1e9)
        prefill = PrefillHalf(
            request_id=request_id,
            transfer_id=transfer_id,
            conductor=CONDUCTOR,
            model=ModelName("exact"),
            tenant=TenantId("default"),
            root=ROOT,
            tokens=tuple(prompt),
            reuse=tuple(reuse),
            decode_worker=DECODE,
            deadline_ns=deadline_ns,
        )
        decode = DecodeHalf(
            request_id=request_id,
            transfer_id=transfer_id,
            conductor=CONDUCTOR,
            model=ModelName("exact"),
            tenant=TenantId("default"),
            root=ROOT,
            tokens=tuple(prompt),
            sampling=sampling or Sampling(max_tokens=6),
            seed=SEED,
            reply=f"reply.{self._number}",
            receipt=f"receipt.{self._number}",
            encoding=encoding,
            prefill_worker=prefill_worker,
            known=tuple(known),
            deadline_ns=deadline_ns,
        )
        return prefill, decode

    async def send_prefill(self, half: PrefillHalf) -> HalfAccepted:
        return await call(self.bus, subjects.split_prefill(PREFILL), half, HalfAccepted, timeout_s=5)

    async def send_decode(self, half: DecodeHalf) -> HalfAccepted:
        return await call(self.bus, subjects.split_decode(DECODE), half, HalfAccepted, timeout_s=5)

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        reuse: Sequence[tuple[ChunkSource, ...]] = (),
        sampling: Sampling | None = None,
        known: Sequence[int] = (),
        encoding: Encoding = Encoding.MSGPACK,
    ) -> tuple[PrefillHalf, DecodeHalf, Reader]:
        """Both halves, as a conductor sends them."""
        prefill, decode = self.halves(prompt, reuse=reuse, sampling=sampling, known=known, encoding=encoding)
        reader = await self.listen(decode.reply)
        await self.send_prefill(prefill)
        await self.send_decode(decode)
        return prefill, decode, reader

    async def cancel(self, request_id: RequestId) -> None:
        await announce(self.bus, subjects.CANCEL, RequestCancel(request_id=request_id))

    def ended_of(self, role: Role) -> list[HalfEnded]:
        return [ended for ended in self.ended if ended.role is role]

    async def move_to_b(self, tokens: Sequence[int]) -> None:
        """The whole chunks of this prompt from node-a's pool to node-b's."""
        keys = chunk_keys(ROOT, tokens, CHUNK_TOKENS)
        size = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
        wanted = [
            WantedChunk(key=key, index=at, num_tokens=CHUNK_TOKENS, num_bytes=size, sources=(self.node_a.source,))
            for at, key in enumerate(keys)
        ]
        acquired = await self.node_b.client.acquire(RequestId("req-move"), wanted)
        assert all(chunk.slot is not None for chunk in acquired.chunks)
        await self.node_b.client.release(acquired.lease_id)
        store = self.node_a.service.store
        store.evict([slot.number for slot in list(store.ledger.slots.registered()) if slot.key in keys])

    async def idle(self) -> None:
        """Everything that requests hold is given back. Fails where it isn't, in time."""

        def is_idle() -> bool:
            return (
                self.prefill.heartbeat().num_running == self.decode.heartbeat().num_running == 0
                and self.num_halves == 0
                and self.prefill_engine.stats().running == self.decode_engine.stats().running == 0
                and all(node.service.store.ledger.slots.counts().leased == 0 for node in (self.node_a, self.node_b))
                and all(node.service.store.ledger.slots.counts().staged == 0 for node in (self.node_a, self.node_b))
            )

        await until(is_idle, 15, what="idle")
        for node in (self.node_a, self.node_b):
            node.service.store.ledger.check_integrity()
            assert len(node.service.store.ledger.leases) == 0
        halves = [
            task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("prefill xfer", "outbox"))
        ]
        assert halves == []
        for telemetry in self.telemetries:
            assert await asyncio.to_thread(telemetry.flush)

    @property
    def num_halves(self) -> int:
        return len(self.prefill._jobs) + len(self.decode._jobs)

    def chunk_spans(self, side: str) -> list[ReadableSpan]:
        spans = self.prefill_spans if side == "prefill" else self.decode_spans
        return [span for span in spans.get_finished_spans() if span.name == "chunk"]

    def outcomes(self, side: str) -> list[str]:
        return [str((span.attributes or {})["halfmoon.chunk.outcome"]) for span in self.chunk_spans(side)]


@asynccontextmanager
async def cluster(
    directory: Path,
    *,
    host_b: str = "host-1",
    num_slots: int = 32,
    num_slots_b: int | None = None,
    decode_settings: dict[str, object] | None = None,
    prefill_settings: dict[str, object] | None = None,
    pool_settings: dict[str, object] | None = None,
    prefill_engine: Engine | None = None,
    decode_engine: Engine | None = None,
    connect: BusMaker | None = None,
) -> AsyncIterator[Cluster]:
    """`connect`: to the broker, where it isn't one in memory.

    Engines of another kind than `ExactEngine` go with settings that name their model, and slots of their size.
    """
    broker = MemoryBroker() if connect is None else connect
    model = tiny_tokenizer.byte_level(directory / "model")
    failures: list[str] = []
    async with AsyncExitStack() as stack:
        node_a = await stack.enter_async_context(
            running_node(broker, directory, "node-a", num_slots=num_slots, settings=pool_settings)
        )
        node_b = await stack.enter_async_context(
            running_node(
                broker, directory, "node-b", host=host_b, num_slots=num_slots_b or num_slots, settings=pool_settings
            )
        )
        prefill_engine, decode_engine = prefill_engine or ExactEngine(), decode_engine or ExactEngine()
        spans_p, spans_d = InMemorySpanExporter(), InMemorySpanExporter()
        telemetry_p = setup("prefill", exporters={"memory": spans_p})
        telemetry_d = setup("decode", exporters={"memory": spans_d})
        stack.push_async_callback(telemetry_p.aclose)
        stack.push_async_callback(telemetry_d.aclose)
        prefill_config = {"model": model, "node": "node-a", **UNHEARD, **(prefill_settings or {})}
        decode_config = {"model": model, "node": "node-b", **UNHEARD, **(decode_settings or {})}
        bus_p, bus_d, bus = [await attached_to(broker) for _ in range(3)]
        for each in (bus_p, bus_d, bus):
            stack.push_async_callback(each.close)
        prefill = Prefill(
            _runtime(PREFILL, PrefillConfig(**prefill_config), bus_p, telemetry_p, failures),  # type: ignore[arg-type]
            prefill_engine,
        )
        decode = Decode(
            _runtime(DECODE, DecodeConfig(**decode_config), bus_d, telemetry_d, failures),  # type: ignore[arg-type]
            decode_engine,
        )
        stack.push_async_callback(prefill.stop)
        stack.push_async_callback(decode.stop)
        await prefill.start()
        await decode.start()
        running = Cluster(
            bus,
            node_a,
            node_b,
            prefill,
            decode,
            cast("ExactEngine", prefill_engine),
            cast("ExactEngine", decode_engine),
            spans_p,
            spans_d,
            (telemetry_p, telemetry_d),
            failures,
        )
        decoder: Decoder[HalfEnded] = Decoder(HalfEnded)

        async def on_ended(message: BusMessage) -> None:
            running.ended.append(decoder.decode(message.data, message.headers))

        await bus.subscribe(subjects.ended(CONDUCTOR), on_ended)
        running.beating |= {PREFILL, DECODE}
        beats = asyncio.create_task(_beat(running))
        try:
            yield running
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)


def _runtime(worker: WorkerId, config: C, bus: Bus, telemetry: Telemetry, failures: list[str]) -> Runtime[C]:
    return Runtime(
        service=worker.partition("-")[0],
        worker_id=worker,
        config=config,
        bus=bus,
        telemetry=telemetry,
        metrics=Metrics(),
        log=structlog.stdlib.get_logger("test"),
        started_ns=time.time_ns(),
        fail=failures.append,
    )


async def _beat(running: Cluster) -> None:
    """The process's part: heartbeats, for as long as the worker is in `beating`."""
    while True:
        if PREFILL in running.beating:
            await announce(running.bus, subjects.heartbeat(PREFILL), running.prefill.heartbeat())
        if DECODE in running.beating:
            await announce(running.bus, subjects.heartbeat(DECODE), running.decode.heartbeat())
        await asyncio.sleep(0.1)


def prompt(length: int, first: int = 40) -> list[int]:
    """Token ids without special ones."""
    return [2 + (first + 7 * place) % 250 for place in range(length)]
