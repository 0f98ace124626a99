"""A test in the conductor's place: sends the two halves of a request to workers of its choice, and hears them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call
from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import BusMessage
from halfmoon.chunks.keys import Namespace
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, TenantId, WorkerId, new_request_id, new_transfer_id
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.members import Heartbeat, NodeHeartbeat, WorkerHeartbeat
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.requests import Failed, Finished, Sampling, TokenEvent, Tokens
from halfmoon.schemas.splits import DecodeHalf, HalfAccepted, HalfEnded, KvInbox, KvReady, PrefillHalf, ReadyChunk, Role

CONDUCTOR = WorkerId("test-conductor")
TIMEOUT_S = 50.0

_HEARTBEAT = Decoder[Heartbeat](Heartbeat)
_KV = Decoder[KvInbox](KvInbox)
_EVENT = Decoder[TokenEvent](TokenEvent)
_ENDED = Decoder[HalfEnded](HalfEnded)


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    terminal: Finished | Failed | None = None
    ready: dict[int, ReadyChunk] = field(default_factory=dict)
    """What prefill announced, by chunk number."""
    ended: dict[Role, HalfEnded] = field(default_factory=dict)
    sent_s: float = 0.0
    """On the monotonic clock."""
    token_times_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Halves:
    bus: NatsBus
    card: ModelCard
    epochs: dict[NodeId, int]

    def source(self, node: str) -> ChunkSource:
        return ChunkSource(node=NodeId(node), epoch=self.epochs[NodeId(node)])

    async def pool(self, node: str) -> PoolStats:
        return await call(self.bus, f"{subjects.kv_tier(NodeId(node))}.stats", Stats(), PoolStats, timeout_s=5.0)

    async def send(
        self,
        tokens: Sequence[int],
        *,
        prefill: str,
        decode: str,
        reuse: Sequence[str] = (),
        max_tokens: int = 4,
        tenant: str = "default",
    ) -> Outcome:
        """Run one request, greedily, until both halves end; `reuse` names the node to take chunk 0, 1, … from."""
        request_id, transfer_id = new_request_id(), new_transfer_id()
        outcome, done = Outcome(), asyncio.Event()
        reply = self.bus.new_inbox()

        async def on_event(message: BusMessage) -> None:
            event = _EVENT.decode(message.data)
            assert outcome.terminal is None, "a message after the terminal one"
            outcome.text += "" if isinstance(event, Failed) else event.text
            if isinstance(event, Tokens):
                assert event.seq == len(outcome.tokens)
                outcome.tokens += event.tokens
                outcome.token_times_s += [time.monotonic()] * len(event.tokens)
            else:
                outcome.terminal = event
            self._check(outcome, done)

        async def on_ready(message: BusMessage) -> None:
            announced = _KV.decode(message.data)
            if isinstance(announced, KvReady) and announced.transfer_id == transfer_id:
                outcome.ready.update({chunk.index: chunk for chunk in announced.chunks})

        async def on_ended(message: BusMessage) -> None:
            ended = _ENDED.decode(message.data)
            if ended.request_id == request_id:
                outcome.ended[ended.role] = ended
                self._check(outcome, done)

        heard = [
            await self.bus.subscribe(reply, on_event),
            await self.bus.subscribe(subjects.kv_ready(WorkerId(decode)), on_ready),
            await self.bus.subscribe(subjects.ended(CONDUCTOR), on_ended),
        ]
        root = Namespace.of(self.card, tenant_salt=tenant).root()
        shared = {
            "request_id": request_id,
            "transfer_id": transfer_id,
            "conductor": CONDUCTOR,
            "model": self.card.name,
            "tenant": TenantId(tenant),
            "root": root,
            "tokens": tuple(tokens),
            "deadline_ns": time.time_ns() + int(TIMEOUT_S * 1e9),
        }
        decode_half = msgspec.convert(
            shared
            | {
                "type": "split.decode.v1",
                "sampling": Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                "seed": 0,
                "reply": reply,
                "prefill_worker": prefill,
            },
            DecodeHalf,
        )
        prefill_half = msgspec.convert(
            shared
            | {
                "type": "split.prefill.v1",
                "reuse": tuple((self.source(node),) for node in reuse),
                "decode_worker": decode,
            },
            PrefillHalf,
        )
        outcome.sent_s = time.monotonic()
        try:
            for subject, half in (
                (subjects.split_decode(WorkerId(decode)), decode_half),
                (subjects.split_prefill(WorkerId(prefill)), prefill_half),
            ):
                await call(self.bus, subject, half, HalfAccepted, timeout_s=5.0)
            await asyncio.wait_for(done.wait(), TIMEOUT_S)
        finally:
            for subscription in heard:
                await subscription.unsubscribe()
        return outcome

    def _check(self, outcome: Outcome, done: asyncio.Event) -> None:
        if outcome.terminal is not None and {Role.PREFILL, Role.DECODE} <= outcome.ended.keys():
            done.set()


@asynccontextmanager
async def halves(url: str) -> AsyncIterator[Halves]:
    """Connect, and learn who is there from heartbeats."""
    bus = await NatsBus.connect(NatsSettings(url=url, name="test"))
    nodes: dict[NodeId, int] = {}
    cards: list[ModelCard] = []
    known = asyncio.Event()

    async def hear(message: BusMessage) -> None:
        beat = _HEARTBEAT.decode(message.data)
        if isinstance(beat, NodeHeartbeat):
            nodes[beat.node] = beat.epoch
        if isinstance(beat, WorkerHeartbeat) and beat.card is not None:
            cards.append(beat.card)
        if len(nodes) >= 2 and cards:
            known.set()

    subscription = await bus.subscribe(subjects.HEARTBEAT_ALL, hear)
    try:
        await asyncio.wait_for(known.wait(), 10.0)
        await subscription.unsubscribe()
        yield Halves(bus, cards[0], nodes)
    finally:
        await bus.close()
