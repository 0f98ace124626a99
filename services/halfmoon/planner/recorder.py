"""Hears the requests of a running system, in the halves that its conductors send, and makes lines of them."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import Undecodable
from halfmoon.bus.protocol import Bus, BusMessage, ConnectionState, Subscription
from halfmoon.planner.overhead import Overhead
from halfmoon.scheduling.costs.fitted import Fitted
from halfmoon.scheduling.costs.traffic import Traffic
from halfmoon.scheduling.estimates import Assumed
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.members import Heartbeat, WorkerHeartbeat
from halfmoon.schemas.splits import DecodeHalf, DecodeInbox, HalfEnded, Role
from halfmoon.traces.recording import AnyLine, BlockHasher, EndLine, ModelLine, RequestLine

MAX_OPEN = 20_000
"""Requests that have begun and not ended; of more, the oldest are written as they are."""
MAX_ENDED = 65_536
"""Requests remembered after their end, so that a half sent again isn't taken for another request."""


@dataclass(slots=True)
class RecorderCounts:
    num_requests: int = 0
    prompt_tokens: int = 0
    num_undecodable: int = 0
    num_disconnects: int = 0


class Recorder:
    """1. `open` subscribes. 2. Lines go to `write` as requests end. 3. `close` writes what hasn't ended, and the end.

    Any number may listen beside the conductors; none is noticed.
    """

    def __init__(self, bus: Bus, hasher: BlockHasher, write: Callable[[AnyLine], None]) -> None:
        self._bus = bus
        self._hasher = hasher
        self._write = write
        self._halves: Decoder[DecodeHalf] = Decoder(DecodeInbox)
        self._ends: Decoder[HalfEnded] = Decoder(HalfEnded)
        self._heartbeats: Decoder[Heartbeat] = Decoder(Heartbeat)
        self._open: OrderedDict[RequestId, RequestLine] = OrderedDict()
        self._ended: OrderedDict[RequestId, None] = OrderedDict()
        self._models: dict[str, ModelLine] = {}
        self._overheads: defaultdict[str, Overhead] = defaultdict(Overhead)
        self._written_models: dict[str, ModelLine] = {}
        self._subscriptions: list[Subscription] = []
        self._unwatch: Callable[[], None] | None = None
        self._begin_ns = time.monotonic_ns()
        self._fitted = Fitted(Assumed(), Traffic())
        self.counts = RecorderCounts()

    @property
    def elapsed_ms(self) -> int:
        return (time.monotonic_ns() - self._begin_ns) // 1_000_000

    @property
    def num_missed(self) -> int:
        return self.counts.num_undecodable + sum(each.dropped + each.failed for each in self._subscriptions)

    async def open(self) -> None:
        self._unwatch = self._bus.watch_connection(self._on_connection)
        for subject, hear in (
            (subjects.HEARTBEAT_ALL, self._on_heartbeat),
            (subjects.ENDED_ALL, self._on_ended),
            (subjects.SPLIT_DECODE_ALL, self._on_half),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, hear))

    async def close(self) -> None:
        """Idempotent."""
        if self._unwatch is None:
            return
        self._unwatch()
        self._unwatch = None
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        while self._open:
            self._write(self._open.popitem(last=False)[1])
        for name, model in self._models.items():
            if model.prefill_fit is not None and model.step_fit is not None:
                overhead_s = self._overheads[name].seconds(model.prefill_fit, model.step_fit)
                model = msgspec.structs.replace(model, request_s=overhead_s)
            if self._written_models.get(name) != model:
                self._write(model)
        self._write(
            EndLine(
                at_ms=self.elapsed_ms,
                num_requests=self.counts.num_requests,
                num_missed_messages=self.num_missed,
                num_disconnects=self.counts.num_disconnects,
            )
        )

    def _on_connection(self, state: ConnectionState) -> None:
        self.counts.num_disconnects += state is ConnectionState.DISCONNECTED

    async def _on_half(self, message: BusMessage) -> None:
        try:
            half = self._halves.decode(message.data, message.headers)
        except Undecodable:
            self.counts.num_undecodable += 1
            return
        if not isinstance(half, DecodeHalf) or half.request_id in self._open or half.request_id in self._ended:
            return
        self._open[half.request_id] = RequestLine(
            at_ms=max(0, self.elapsed_ms - round(1000 * half.waited_s)),
            model=half.model,
            tenant=self._hasher.name(half.tenant),
            service_class=half.service_class,
            prompt_tokens=len(half.tokens),
            blocks=self._hasher.blocks(half.root, half.tokens),
        )
        self.counts.num_requests += 1
        self.counts.prompt_tokens += len(half.tokens)
        if len(self._open) > MAX_OPEN:
            oldest, line = self._open.popitem(last=False)
            self._remember(oldest)
            self._write(line)

    async def _on_ended(self, message: BusMessage) -> None:
        try:
            ended = self._ends.decode(message.data, message.headers)
        except Undecodable:
            self.counts.num_undecodable += 1
            return
        line = self._open.pop(ended.request_id, None) if ended.role is not Role.PREFILL else None
        if line is not None:
            self._remember(ended.request_id)
            self._overheads[line.model].hear(ended)
            self._write(msgspec.structs.replace(line, completion_tokens=ended.num_generated_tokens))

    async def _on_heartbeat(self, message: BusMessage) -> None:
        try:
            beat = self._heartbeats.decode(message.data, message.headers)
        except Undecodable:
            self.counts.num_undecodable += 1
            return
        if not isinstance(beat, WorkerHeartbeat) or beat.card is None:
            return
        self._fitted.hear_worker(beat)
        known = self._models.get(beat.card.name)
        rate = beat.prefill_tokens_per_s if beat.role is not Role.DECODE else None
        model = ModelLine(
            name=beat.card.name,
            kv_bytes_per_token=beat.card.kv_bytes_per_token,
            chunk_tokens=beat.card.chunk_tokens,
            prefill_tokens_per_s=rate if rate is not None else known.prefill_tokens_per_s if known else None,
            prefill_fit=self._fit("prefill", beat) or (known.prefill_fit if known else None),
            step_fit=self._fit("tbt", beat) or (known.step_fit if known else None),
            kv_tokens=beat.total_tokens or None
            if beat.role is not Role.PREFILL
            else known.kv_tokens
            if known
            else None,
        )
        self._models[model.name] = model
        if known is None:
            self._written_models[model.name] = model
            self._write(model)

    def _fit(self, kind: str, beat: WorkerHeartbeat) -> tuple[float, float, float] | None:
        """What the workers of this one's model and role measured."""
        card = beat.card
        if card is None:
            return None
        subject = f"{card.name} {card.fingerprint} {beat.role.value}"
        found = (fit.coefficients for fit in self._fitted.fits() if fit.kind == kind and fit.subject == subject)
        constant, linear, rest = next(found, (None, 0.0, 0.0))
        return None if constant is None else (constant, linear, rest)

    def _remember(self, request_id: RequestId) -> None:
        self._ended[request_id] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
