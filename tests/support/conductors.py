"""A conductor among workers that do as they are told: what it sends them, and what its clients hear."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.bus.codec import Decoder, encode
from halfmoon.bus.endpoint import acknowledge
from halfmoon.bus.protocol import Bus, BusMessage, Subscription
from halfmoon.conductor.config import ConductorConfig
from halfmoon.conductor.service import Conductor
from halfmoon.lifecycle import Runtime
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, NodeId, RequestId, TransferId, WorkerId
from halfmoon.schemas.members import (
    Goodbye,
    MemberState,
    NodeHeartbeat,
    RequestProgress,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.pool_stats import PoolStats
from halfmoon.schemas.requests import (
    Failed,
    Finished,
    FinishReason,
    RequestCancel,
    RequestSubmitted,
    TokenEvent,
    Tokens,
    Usage,
)
from halfmoon.schemas.splits import (
    DecodeHalf,
    HalfAccepted,
    HalfEnded,
    KvFailed,
    KvInbox,
    PrefillHalf,
    Role,
    TransferDone,
)
from halfmoon.schemas.wire import HEADER_REPLY, Error, ErrorCode, Message
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from support.heart import Heart

MODEL = ModelName("tiny")
CARD = ModelCard(
    name=MODEL,
    engine="sim",
    fingerprint="f" * 64,
    kv_dtype="float32",
    layout="lktHd.v1",
    kv_bytes_per_token=64,
    chunk_tokens=16,
    max_model_tokens=256,
    vocab_size=1000,
)
BUSY = Error(code=ErrorCode.BUSY, message="the queue is full", retry_after_s=0.5)
BEAT_S = 0.05
PROMPT = tuple(range(1, 41))

_lives = itertools.count(time.time_ns())


class FakeWorker:
    """Accepts, refuses or ignores its halves; ends them only when told to, unless `finishes`."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        role: Role,
        node: str,
        *,
        card: ModelCard | None = CARD,
        state: MemberState = MemberState.SERVING,
        answer: Error | None = None,
        is_silent: bool = False,
        finishes: bool = False,
        num_waiting: int = 0,
    ) -> None:
        self.bus = bus
        self.worker = WorkerId(worker)
        self.role = role
        self.node = NodeId(node)
        self.card = card
        self.state = state
        self.answer = answer
        self.is_silent = is_silent
        self.finishes = finishes
        self.num_waiting = num_waiting
        self.started_ns = next(_lives)
        self.prefills: list[PrefillHalf] = []
        self.decodes: list[DecodeHalf] = []
        self.headers: list[dict[str, str]] = []
        self.cancels: list[RequestId] = []
        self.kv_failed: list[KvFailed] = []
        self.transfers_done: list[TransferId] = []
        self.cached_tokens = 0
        """What it reports of each request, as found in the cache."""
        self.running: dict[RequestId, DecodeHalf | PrefillHalf] = {}
        self.sent: dict[RequestId, list[int]] = defaultdict(list)
        self._reported: dict[RequestId, int] = defaultdict(int)
        self._subscriptions: list[Subscription] = []
        self._beating: asyncio.Task[None] | None = None

    async def start(self, *, beats: bool = True) -> None:
        split = subjects.split_prefill if self.role is Role.PREFILL else subjects.split_decode
        self._subscriptions = [
            await self.bus.subscribe(split(self.worker), self._on_split),
            await self.bus.subscribe(subjects.CANCEL, self._on_split),
            await self.bus.subscribe(subjects.kv_ready(self.worker), self._on_kv),
        ]
        await self.beat()
        if beats:
            self._beating = asyncio.create_task(self._beat_on())

    async def stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None

    async def die(self) -> None:
        """As with SIGKILL: it says nothing more."""
        await self.stop_beating()
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()
        self.running.clear()

    async def leave(self) -> None:
        """As `die`, but everybody knows at once."""
        await self.die()
        await self.bus.publish(subjects.heartbeat(self.worker), encode(Goodbye(worker=self.worker)))

    async def rise(self, *, beats: bool = True) -> None:
        """A new life under the same name."""
        self.started_ns = next(_lives)
        self.sent.clear()
        self._reported.clear()
        await self.start(beats=beats)

    @property
    def is_alive(self) -> bool:
        return bool(self._subscriptions)

    async def generate(self, request_id: RequestId, *tokens: int) -> None:
        half = self.running[request_id]
        assert isinstance(half, DecodeHalf)
        seq = len(half.known) + len(self.sent[request_id])
        self.sent[request_id] += tokens
        await self._say(half, Tokens(request_id=request_id, seq=seq, tokens=tokens, text=""))

    async def end(self, request_id: RequestId, error: Error | None = None, *, tells_conductor: bool = True) -> None:
        """The half's end, told to the client where it is decode's, and to the conductor."""
        half = self.running.pop(request_id)
        event: TokenEvent
        if isinstance(half, DecodeHalf):
            if error is None:
                num_tokens = len(half.known) + len(self.sent[request_id])
                usage = Usage(prompt_tokens=len(half.tokens), completion_tokens=num_tokens)
                event = Finished(
                    request_id=request_id, seq=num_tokens, text="", finish_reason=FinishReason.STOP, usage=usage
                )
            else:
                event = Failed(request_id=request_id, error=error)
            await self._say(half, event)
            assert half.receipt is not None
            await acknowledge(self.bus, half.receipt)
        if tells_conductor:
            ended = HalfEnded(
                request_id=request_id,
                transfer_id=half.transfer_id,
                worker=self.worker,
                role=self.role,
                error=error,
            )
            await self.bus.publish(subjects.ended(half.conductor), encode(ended))

    async def beat(self) -> None:
        progress = []
        for request_id, half in self.running.items():
            sent = self.sent[request_id]
            known = len(half.known) if isinstance(half, DecodeHalf) else 0
            new = tuple(sent[self._reported[request_id] :])
            self._reported[request_id] = len(sent)
            progress.append(
                RequestProgress(
                    request_id=request_id,
                    num_tokens=known + len(sent),
                    new_tokens=new,
                    cached_tokens=self.cached_tokens,
                )
            )
        heartbeat = WorkerHeartbeat(
            worker=self.worker,
            role=self.role,
            node=self.node,
            started_ns=self.started_ns,
            state=self.state,
            card=self.card,
            num_running=len(self.running),
            num_waiting=self.num_waiting,
            free_tokens=4096,
            total_tokens=4096,
            max_requests=16,
            requests=tuple(progress),
        )
        await self.bus.publish(subjects.heartbeat(self.worker), encode(heartbeat))

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.beat()

    async def _on_split(self, message: BusMessage) -> None:
        heard = _SPLITS.decode(message.data, message.headers)
        match heard:
            case PrefillHalf() | DecodeHalf():
                await self._on_half(heard, message)
            case RequestCancel():
                self.cancels.append(heard.request_id)
                if heard.request_id in self.running:
                    await self.end(heard.request_id, Error(code=ErrorCode.CANCELLED, message=heard.reason))
            case TransferDone():
                self.transfers_done.append(heard.transfer_id)
                self.running.pop(heard.request_id, None)

    async def _on_half(self, half: PrefillHalf | DecodeHalf, message: BusMessage) -> None:
        self.headers.append(dict(message.headers))
        if isinstance(half, PrefillHalf):
            self.prefills.append(half)
        else:
            self.decodes.append(half)
            known = self.running.get(half.request_id)
            if known is not None and known.transfer_id == half.transfer_id:
                await self._answer(message, HalfAccepted(request_id=half.request_id))
                return
        if self.answer is not None:
            await self._answer(message, self.answer)
            return
        if self.is_silent:
            return
        self.running[half.request_id] = half
        await self._answer(message, HalfAccepted(request_id=half.request_id))
        if self.finishes and isinstance(half, DecodeHalf):
            await self.generate(half.request_id, 7, 8)
            await self.end(half.request_id)

    async def _on_kv(self, message: BusMessage) -> None:
        heard = _KV.decode(message.data, message.headers)
        if isinstance(heard, KvFailed):
            self.kv_failed.append(heard)

    async def _answer(self, message: BusMessage, answer: Message) -> None:
        if message.reply is not None:
            await self.bus.respond(message, encode(answer))

    async def _say(self, half: DecodeHalf, event: TokenEvent) -> None:
        await self.bus.publish(half.reply, encode(event, half.encoding))


_SPLITS: Decoder[PrefillHalf | DecodeHalf | TransferDone | RequestCancel] = Decoder(
    PrefillHalf | DecodeHalf | TransferDone | RequestCancel
)
_KV: Decoder[Any] = Decoder(KvInbox)


class Client:
    """Submits to the work queue, and keeps what comes back."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.reply = f"{bus.new_inbox()}.tokens"
        self.events: list[TokenEvent] = []
        self.raw: list[bytes] = []
        self._decoder: Decoder[TokenEvent] = Decoder(TokenEvent)

    async def start(self) -> None:
        await self.bus.subscribe(self.reply, self._on_event)

    async def submit(self, request: RequestSubmitted, *, headers: dict[str, str] | None = None) -> None:
        await self.submit_raw(encode(request), headers=headers, msg_id=request.request_id)

    async def submit_raw(
        self, data: bytes, *, headers: dict[str, str] | None = None, msg_id: str | None = None, model: str = MODEL
    ) -> None:
        full = {HEADER_REPLY: self.reply, **(headers or {})}
        await self.bus.stream_publish(subjects.request(ModelName(model)), data, headers=full, msg_id=msg_id)

    async def cancel(self, request_id: RequestId) -> None:
        await self.bus.publish(subjects.CANCEL, encode(RequestCancel(request_id=request_id)))

    def ends(self, request_id: str | None = None) -> list[Finished | Failed]:
        return [
            event for event in self.events if not isinstance(event, Tokens) and request_id in (None, event.request_id)
        ]

    def failure(self) -> Error:
        """The one end there is, which is a failure."""
        ends = self.ends()
        assert len(ends) == 1, ends
        assert isinstance(ends[0], Failed), ends
        return ends[0].error

    async def _on_event(self, message: BusMessage) -> None:
        self.raw.append(message.data)
        self.events.append(self._decoder.decode(message.data, message.headers))


def conductor_on(
    bus: Bus, name: str = "conductor-1", **settings: Any
) -> tuple[Conductor, InMemorySpanExporter, Metrics]:
    """A conductor with short times; not started. A failure of one of its tasks raises."""
    spans = InMemorySpanExporter()
    metrics = Metrics()
    values = {
        "listen_first_s": 0.15,
        "ack_wait_s": 0.6,
        "adopt_wait_s": 0.3,
        "split_timeout_s": 0.3,
        "deadline_grace_s": 0.2,
        "drain_timeout_s": 1.0,
        **settings,
    }
    runtime = Runtime(
        service="conductor",
        worker_id=WorkerId(name),
        config=msgspec.convert(values, ConductorConfig),
        bus=bus,
        telemetry=setup("conductor", exporters={"memory": spans}),
        metrics=metrics,
        log=structlog.stdlib.get_logger("test"),
        started_ns=time.time_ns(),
        fail=_raise,
    )
    return Conductor(runtime), spans, metrics


def _raise(why: str) -> None:
    raise AssertionError(why)


class Stage:
    """One conductor, its workers and a client, each on a bus of its own."""

    def __init__(self, make_bus: Callable[[], Any]) -> None:
        self._make_bus = make_bus
        self.workers: dict[str, FakeWorker] = {}
        self.conductors: list[Conductor] = []
        self.spans: list[InMemorySpanExporter] = []
        self.metrics: list[Metrics] = []
        self._heart: Heart | None = None

    async def open(self, *workers: tuple[str, Role, str], conductor: bool = True, **settings: Any) -> "Stage":
        self.client = Client(await self._make_bus())
        await self.client.start()
        # Somebody else is heard too, as in life: a conductor that hears nobody at all takes itself for deaf.
        self._heart = Heart(self.client.bus, REGISTRY_BEAT, every_s=BEAT_S)
        for name, role, node in workers:
            await self.add_worker(name, role, node)
        if conductor:
            await self.add_conductor(**settings)
        return self

    async def add_worker(self, name: str, role: Role, node: str, **settings: Any) -> FakeWorker:
        worker = FakeWorker(await self._make_bus(), name, role, node, **settings)
        self.workers[name] = worker
        await worker.start()
        return worker

    async def add_conductor(self, name: str = "conductor-1", **settings: Any) -> Conductor:
        conductor, spans, metrics = conductor_on(await self._make_bus(), name, **settings)
        self.conductors.append(conductor)
        self.spans.append(spans)
        self.metrics.append(metrics)
        await conductor.start()
        return conductor

    async def close(self) -> None:
        if self._heart is not None:
            await self._heart.stop()
        for conductor in self.conductors:
            await conductor.stop()
            await conductor.telemetry.aclose()
        for worker in self.workers.values():
            await worker.die()

    def value(self, name: str, labels: dict[str, str] | None = None, conductor: int = 0) -> float:
        """Of one metric of one conductor."""
        return self.metrics[conductor].registry.get_sample_value(name, labels or {}) or 0.0


def node_beat(node: str, epoch: int) -> NodeHeartbeat:
    return NodeHeartbeat(
        worker=WorkerId(f"kv-tier-{node}"),
        node=NodeId(node),
        epoch=epoch,
        started_ns=epoch,
        state=MemberState.SERVING,
        host="here",
        pool=PoolStats(total=1, free=1, staged=0, ready=0, leased=0, num_leases=0, num_chunks=0),
    )


REGISTRY_BEAT = ServiceHeartbeat(
    worker=WorkerId("registry-1"), service="registry", started_ns=1, state=MemberState.SERVING
)
SPLIT_PAIR: Sequence[tuple[str, Role, str]] = (("p1", Role.PREFILL, "node-a"), ("d1", Role.DECODE, "node-b"))


OpenStage = Callable[..., Awaitable[Stage]]
"""Takes the workers to begin with (`SPLIT_PAIR` unless given), and the conductor's settings."""


def request(name: str = "req-1", **fields: Any) -> RequestSubmitted:
    return RequestSubmitted(request_id=RequestId(name), model=MODEL, tokens=fields.pop("tokens", PROMPT), **fields)
