"""A conductor and two workers that answer from a script: the token protocol's other side, on any bus."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence

from halfmoon.bus.codec import decode, encode
from halfmoon.bus.protocol import Bus, BusMessage, Delivery, Retention, StreamSpec
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, NodeId, RequestId, WorkerId
from halfmoon.schemas.members import Goodbye, Heartbeat, MemberState, ServiceHeartbeat, WorkerHeartbeat
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.requests import (
    Failed,
    Finished,
    FinishReason,
    RequestCancel,
    RequestSubmitted,
    TokenEvent,
    TokenLogprob,
    Tokens,
    TopLogprob,
    Usage,
)
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import HEADER_REPLY, Error, ErrorCode
from halfmoon.text import StopScanner, TextCodec

MODEL = ModelName("tiny")
REQUESTS = StreamSpec(name=subjects.REQUESTS_STREAM, subjects=(subjects.REQUEST_ALL,), retention=Retention.WORK_QUEUE)


class Answering:
    """One request's side of the answer."""

    def __init__(self, bus: Bus, request: RequestSubmitted, reply: str) -> None:
        assert request.request_id is not None
        self.request = request
        self.request_id: RequestId = request.request_id
        self._bus = bus
        self._reply = reply
        self.num_tokens = 0

    async def send(self, event: TokenEvent) -> None:
        await self._bus.publish(self._reply, encode(event))

    async def tokens(self, tokens: Sequence[int], text: str, logprobs: tuple[TokenLogprob, ...] | None = None) -> None:
        await self.send(
            Tokens(request_id=self.request_id, seq=self.num_tokens, tokens=tuple(tokens), text=text, logprobs=logprobs)
        )
        self.num_tokens += len(tokens)

    async def finish(self, reason: FinishReason = FinishReason.STOP, *, text: str = "", cached: int = 0) -> None:
        usage = Usage(
            prompt_tokens=len(self.request.tokens or ()), completion_tokens=self.num_tokens, cached_tokens=cached
        )
        await self.send(
            Finished(request_id=self.request_id, seq=self.num_tokens, text=text, finish_reason=reason, usage=usage)
        )

    async def fail(self, code: ErrorCode, message: str = "so it goes", retry_after_s: float | None = None) -> None:
        error = Error(code=code, message=message, retry_after_s=retry_after_s)
        await self.send(Failed(request_id=self.request_id, error=error))


Script = Callable[[Answering], Awaitable[None]]


class FakeCluster:
    """`script` answers each request; it is cancelled when the request is. `seen` and `cancelled` say what was heard."""

    def __init__(self, bus: Bus, script: Script, *, max_model_tokens: int = 256, vocab_size: int = 1000) -> None:
        self._bus = bus
        self.script = script
        self.card = ModelCard(
            name=MODEL,
            engine="sim",
            fingerprint=hashlib.sha256(b"tiny").hexdigest(),
            kv_dtype="float32",
            layout="lktHd.v1",
            kv_bytes_per_token=64,
            chunk_tokens=16,
            max_model_tokens=max_model_tokens,
            vocab_size=vocab_size,
        )
        self.seen: list[RequestSubmitted] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled: list[RequestId] = []
        self.present = {"conductor", "prefill", "decode"}
        self.life = 1
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.ensure_stream(REQUESTS)
        await self._bus.consume(subjects.REQUESTS_STREAM, "conductors", subjects.REQUEST_ALL, self._on_request)
        await self._bus.subscribe(subjects.CANCEL, self._on_cancel)
        await self.beat()
        self._beating = asyncio.create_task(self._beat_on())

    async def stop(self) -> None:
        tasks = [*self._running.values(), *([self._beating] if self._beating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self, *kinds: str) -> None:
        """A clean stop of some members."""
        self.present -= set(kinds)
        for kind in kinds:
            worker = WorkerId(f"{kind}-1")
            await self._bus.publish(subjects.heartbeat(worker), encode(Goodbye(worker=worker)))

    async def come(self, *kinds: str) -> None:
        self.life += 1
        self.present |= set(kinds)
        await self.beat()

    async def beat(self) -> None:
        for kind in sorted(self.present):
            heartbeat = self._heartbeat(kind)
            await self._bus.publish(subjects.heartbeat(heartbeat.worker), encode(heartbeat))

    def _heartbeat(self, kind: str) -> Heartbeat:
        worker = WorkerId(f"{kind}-1")
        if kind == "conductor":
            return ServiceHeartbeat(worker=worker, service="conductor", started_ns=self.life, state=MemberState.SERVING)
        return WorkerHeartbeat(
            worker=worker,
            role=Role(kind),
            node=NodeId("node-a"),
            started_ns=self.life,
            state=MemberState.SERVING,
            card=self.card,
        )

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            await self.beat()

    async def _on_request(self, delivery: Delivery) -> None:
        await delivery.ack()
        if delivery.subject == subjects.CANCEL:
            return
        request = decode(delivery.data, RequestSubmitted, delivery.headers)
        assert request.request_id is not None
        self.headers.append(dict(delivery.headers))
        self.seen.append(request)
        answering = Answering(self._bus, request, delivery.headers[HEADER_REPLY])
        task = asyncio.create_task(_run(self.script, answering))
        self._running[request.request_id] = task

    async def _on_cancel(self, message: BusMessage) -> None:
        cancel = decode(message.data, RequestCancel, message.headers)
        self.cancelled.append(cancel.request_id)
        if task := self._running.get(cancel.request_id):
            task.cancel()


async def _run(script: Script, answering: Answering) -> None:
    await script(answering)


def saying(codec: TextCodec, text: str, *, cached: int = 0) -> Script:
    """A script that answers any prompt with `text` (and the seed, where there is one), token by token, like decode."""

    async def script(answering: Answering) -> None:
        request = answering.request
        sampling = request.sampling
        said = text if sampling.seed is None else f"{text} {sampling.seed}"
        detokenizer = codec.detokenizer(request.tokens or ())
        scanner = StopScanner(sampling.stop)
        for token in codec.encode(said):
            if sampling.max_tokens is not None and answering.num_tokens == sampling.max_tokens:
                await answering.finish(
                    FinishReason.LENGTH, text=scanner.push(detokenizer.flush())[0] + scanner.flush(), cached=cached
                )
                return
            shown, stopped = scanner.push(detokenizer.push([token]))
            logprobs = (_logprob(codec, token, sampling.logprobs),) if sampling.logprobs is not None else None
            await answering.tokens([token], shown, logprobs)
            if stopped:
                await answering.finish(cached=cached)
                return
        await answering.finish(text=scanner.push(detokenizer.flush())[0] + scanner.flush(), cached=cached)

    return script


def _logprob(codec: TextCodec, token: int, num_top: int) -> TokenLogprob:
    top = tuple(TopLogprob(token=at, text=codec.token_text(at), logprob=-1.5 - at) for at in range(60, 60 + num_top))
    return TokenLogprob(token=token, text=codec.token_text(token), logprob=-0.25, top=top)


def soon_ns(seconds: float = 20.0) -> int:
    return time.time_ns() + int(seconds * 1e9)
