"""The gateway service: puts its parts together, and takes them apart."""

import asyncio
import os
import time
from pathlib import Path

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import BusError, Undecodable
from halfmoon.bus.protocol import BusMessage, Subscription
from halfmoon.client import GenerateClient
from halfmoon.gateway.answering import Answering
from halfmoon.gateway.app import build_app
from halfmoon.gateway.cluster import Cluster
from halfmoon.gateway.config import GatewayConfig, served_name
from halfmoon.gateway.metrics import GatewayMetrics
from halfmoon.gateway.readiness import Readiness
from halfmoon.gateway.server import HttpServer
from halfmoon.lifecycle import Runtime, StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.members import Heartbeat, MemberState, ServiceHeartbeat
from halfmoon.tasks import ended
from halfmoon.text import TextCodec, TokenizerUnusable

_PROBE_TEXT = "Is the way open from prompt to answer, by prefill, transfer and decode?"
"""Several tokens, so that prefill has something to compute and to hand over."""


class Gateway:
    """OpenAI's HTTP API for one model, whose tokenizer it holds."""

    def __init__(self, runtime: Runtime[GatewayConfig]) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._state = MemberState.LOADING
        self._cluster = Cluster()
        self._heartbeats: Decoder[Heartbeat] = Decoder(Heartbeat)
        self._client = GenerateClient(runtime.bus)
        self._server = HttpServer(runtime.config)
        self._listening: Subscription | None = None
        self._answering: Answering | None = None
        self._probing: asyncio.Task[None] | None = None
        self.num_undecodable = 0

    @property
    def address(self) -> str:
        """The API's URL; empty before `start`."""
        return self._server.address

    def heartbeat(self) -> Heartbeat:
        return ServiceHeartbeat(
            worker=self._runtime.worker_id,
            service=self._runtime.service,
            started_ns=self._runtime.started_ns,
            state=self._state,
            address=self.address,
            pid=os.getpid(),
        )

    async def start(self) -> None:
        config, runtime = self._config, self._runtime
        if config.model is None:
            raise StartupError(
                "no model is set: the gateway needs its tokenizer; set HALFMOON_MODEL to a Hugging Face folder or a "
                "GGUF file"
            )
        self._server.bind()
        codec = await _load(config.model)
        model = ModelName(served_name(config))
        metrics = GatewayMetrics(runtime.metrics)
        try:
            await self._client.start()
            self._listening = await runtime.bus.subscribe(subjects.HEARTBEAT_ALL, self._hear)
        except BusError as error:
            raise StartupError(f"the bus can't be used: {error}") from None
        self._answering = Answering(
            config=config,
            model=model,
            bus=runtime.bus,
            client=self._client,
            codec=codec,
            cluster=self._cluster,
            tracer=runtime.telemetry.tracer,
            metrics=metrics,
            log=runtime.log,
        )
        readiness = Readiness(
            config=config,
            model=model,
            bus=runtime.bus,
            client=self._client,
            cluster=self._cluster,
            prompt=codec.encode(_PROBE_TEXT),
            metrics=metrics,
            log=runtime.log,
        )
        self._probing = asyncio.create_task(self._probe(readiness), name="readiness")
        app = build_app(
            config=config,
            model=model,
            started_ns=runtime.started_ns,
            answering=self._answering,
            cluster=self._cluster,
            readiness=readiness,
            registry=runtime.metrics.registry,
            log=runtime.log,
        )
        await self._server.start(app)
        self._state = MemberState.SERVING
        runtime.log.info("serving", address=self.address, model=model)

    async def drain(self) -> None:
        self._state = MemberState.DRAINING
        if self._answering is not None:
            await self._answering.drain()

    async def stop(self) -> None:
        if self._probing is not None:
            await ended(self._probing)
        await self._server.stop()
        await self._client.close()
        if self._listening is not None:
            await self._listening.unsubscribe()
        if self._answering is not None:
            self._answering.close()

    async def _hear(self, message: BusMessage) -> None:
        try:
            heartbeat = self._heartbeats.decode(message.data, message.headers)
        except Undecodable as error:
            self.num_undecodable += 1
            self._runtime.log.warning("a heartbeat can't be read", subject=message.subject, why=str(error))
            return
        self._cluster.hear(heartbeat, time.monotonic())

    async def _probe(self, readiness: Readiness) -> None:
        try:
            await readiness.run()
        except Exception as error:
            self._runtime.log.exception("readiness can't be watched")
            self._runtime.fail(f"readiness can't be watched: {error}")


async def _load(path: Path) -> TextCodec:
    """In a thread: heartbeats go on meanwhile. Raises `StartupError`."""
    try:
        return await asyncio.to_thread(TextCodec.load, path)
    except TokenizerUnusable as error:
        raise StartupError(f"the model's tokenizer can't be used (HALFMOON_MODEL): {error}") from None
