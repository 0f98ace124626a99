"""The shell of the decode service: halves and announcements in, each half run as a task of its own."""

import asyncio
import time
from typing import assert_never

from halfmoon.bus import endpoint
from halfmoon.bus.endpoint import Endpoint, Envelope
from halfmoon.bus.errors import BusError, RemoteError
from halfmoon.bus.protocol import ServiceRecord
from halfmoon.chunks.plan import plan_chunks
from halfmoon.decode.colocated import Colocated
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.early import EarlyBuffer
from halfmoon.decode.half import DecodeRun
from halfmoon.decode.metrics import DecodeMetrics
from halfmoon.decode.parts import Parts
from halfmoon.decode.policy import refusal
from halfmoon.decode.pull import ChunkPuller
from halfmoon.decode.standing import Standing
from halfmoon.decode.state import HalfState
from halfmoon.engine.contract import Engine
from halfmoon.lifecycle import VERSION, Runtime, StartupError
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import TransferId
from halfmoon.schemas.members import MemberState, WorkerHeartbeat
from halfmoon.schemas.requests import RequestCancel
from halfmoon.schemas.splits import (
    DecodeHalf,
    DecodeInbox,
    HalfAccepted,
    KvFailed,
    KvInbox,
    KvReady,
    TransferDone,
)
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.tasks import ended
from halfmoon.text import TextCodec, TextError
from halfmoon.worker.admission import Load
from halfmoon.worker.chunk_records import ChunkRecorder
from halfmoon.worker.engine import build_engine
from halfmoon.worker.jobs import Jobs
from halfmoon.worker.line import Places
from halfmoon.worker.meters import DecodeMeter, PrefillMeter
from halfmoon.worker.peers import PeerWatch
from halfmoon.worker.prompt import PromptComputer
from halfmoon.worker.recent import RecentTransfers
from halfmoon.worker.station import Station

EARLY_SWEEP_S = 0.5
STOPPING = "this worker stops; send the request again"


class Decode:
    """See `halfmoon.lifecycle.Service` for its life. `engine` is built from the settings unless given."""

    def __init__(self, runtime: Runtime[DecodeConfig], engine: Engine | None = None) -> None:
        config = runtime.config
        self._runtime = runtime
        self._config = config
        self._metrics = DecodeMetrics(runtime.metrics)
        self._station = Station(runtime, engine or build_engine(config), config.role)
        self._peers = PeerWatch(runtime.bus)
        self._standing = Standing(runtime.bus, runtime.worker_id, runtime.log)
        self._early = EarlyBuffer(max_transfers=config.early_transfers, ttl_s=config.early_ttl_s)
        self._runs: dict[TransferId, DecodeRun] = {}
        self._recent = RecentTransfers()
        self._jobs: Jobs[TransferId] = Jobs(self._on_bug)
        self._prefill_meter = PrefillMeter()
        self._decode_meter = DecodeMeter(time.monotonic())
        self._parts: Parts | None = None
        self._endpoints: list[Endpoint] = []
        self._record: ServiceRecord | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        if self._config.model is None:
            raise StartupError("no model is set: HALFMOON_MODEL names a Hugging Face folder or a GGUF file")
        try:
            codec = await asyncio.to_thread(TextCodec.load, self._config.model)
        except TextError as error:
            raise StartupError(str(error)) from error
        await self._station.start()
        self._parts = self._build_parts(codec)
        await self._peers.start()
        self._tasks = [
            asyncio.create_task(self._sweep_early(), name="early announcements"),
            asyncio.create_task(self._standing.run(), name="standing"),
        ]
        bus, worker = self._runtime.bus, self._runtime.worker_id
        self._record = await bus.add_service("halfmoon-decode", VERSION, "Generates from prompts whose KV is ready.")
        subject = subjects.split_decode(worker)
        half = self._record.add_endpoint("half", subject)
        self._endpoints = [
            await endpoint.serve(bus, subjects.kv_ready(worker), KvInbox, self._on_kv),
            await endpoint.serve(bus, subject, DecodeInbox, self._on_message, record=half),
            await endpoint.serve(bus, subjects.CANCEL, RequestCancel, self._on_message),
        ]

    async def drain(self) -> None:
        self._station.pulse.draining()
        await self._jobs.drain()

    async def stop(self) -> None:
        self._station.pulse.draining()
        await self._jobs.close(STOPPING)
        endpoints, self._endpoints = self._endpoints, []
        for each in endpoints:
            await each.unsubscribe()
        if self._record is not None:
            await self._record.stop()
        tasks, self._tasks = self._tasks, []
        await ended(*tasks)
        await self._peers.stop()
        await self._station.stop()

    def heartbeat(self) -> WorkerHeartbeat:
        runs = list(self._runs.values())
        context_tokens = sum(run.context_tokens for run in runs)
        num_waiting = sum(run.state is HalfState.QUEUED for run in runs)
        self._metrics.running.set(len(runs))
        self._metrics.early.set(len(self._early))
        return self._station.pulse.beat(
            self._station.stats(),
            num_running=len(runs) - num_waiting,
            num_waiting=num_waiting,
            queued_tokens=sum(run.num_left_tokens for run in runs),
            requests=[run.progress() for run in runs],
            queued_pairs=sum(run.num_left_pairs for run in runs),
            context_tokens=context_tokens,
            prefills=self._prefill_meter.take(),
            decodes=self._decode_meter.take(time.monotonic(), context_tokens),
        )

    async def _on_message(self, message: DecodeInbox, envelope: Envelope) -> HalfAccepted | None:
        match message:
            case DecodeHalf():
                return await self._accept(message, envelope)
            case RequestCancel():
                error = Error(code=ErrorCode.CANCELLED, message=message.reason)
                for run in list(self._runs.values()):
                    if run.half.request_id == message.request_id:
                        run.job.stop(error)
            case _:
                assert_never(message)
        return None

    async def _on_kv(self, message: KvInbox, envelope: Envelope) -> None:
        run = self._runs.get(message.transfer_id)
        if run is not None:
            await run.transfer.take(message)
        elif self._recent.has(message.transfer_id, 0):
            await self._turn_away(message)
        else:
            for gone in self._early.put(message, time.monotonic()):
                await self._turn_away(gone)

    async def _sweep_early(self) -> None:
        while True:
            await asyncio.sleep(EARLY_SWEEP_S)
            for gone in self._early.expire(time.monotonic()):
                await self._turn_away(gone)

    async def _accept(self, half: DecodeHalf, envelope: Envelope) -> HalfAccepted:
        """Raises `RemoteError`: busy, or never to be served here."""
        accepted = HalfAccepted(request_id=half.request_id)
        running = self._runs.get(half.transfer_id)
        if running is not None:
            if half.attempt > running.half.attempt and half.prefill_worker is not None:
                running.transfer.provided_by(half.prefill_worker)
            return accepted
        if half.attempt > 1 or self._recent.has(half.transfer_id, 0):
            # A later attempt only names another prefill worker: its transfer has ended, maybe with an earlier life.
            return accepted
        run = self._admit(half, envelope)
        self._recent.add(half.transfer_id, half.attempt)
        self._runs[half.transfer_id] = run
        self._jobs.start(half.transfer_id, run.job, self._run(run), name=f"decode {half.transfer_id}")
        for message in self._early.take(half.transfer_id):
            await run.transfer.take(message)
        return accepted

    def _admit(self, half: DecodeHalf, envelope: Envelope) -> DecodeRun:
        parts = self._parts
        if parts is None:
            raise RemoteError(Error(code=ErrorCode.BUSY, message="this worker is still loading its model"))
        card = parts.sequences.card
        load = Load(
            num_halves=len(self._runs),
            max_requests=self._config.max_requests,
            max_queue=self._config.max_queue,
            draining=self._station.pulse.state is MemberState.DRAINING,
        )
        error = refusal(half, card, load, parts.sequences.stats().total_tokens)
        if error is not None:
            self._metrics.refused.labels(error.code.value).inc()
            raise RemoteError(error)
        chunks = plan_chunks(
            half.root,
            half.tokens,
            chunk_tokens=card.chunk_tokens,
            payload_bytes=card.payload_bytes,
            transfer_id=half.transfer_id,
        )
        deadline_ns = half.deadline_ns or envelope.deadline_ns
        if deadline_ns is None:
            deadline_ns = time.time_ns() + int(self._config.request_timeout_s * 1e9)
        return DecodeRun(half, chunks, envelope.context, deadline_ns, parts)

    async def _run(self, run: DecodeRun) -> None:
        try:
            await run.run()
        finally:
            del self._runs[run.half.transfer_id]

    async def _turn_away(self, message: KvReady | KvFailed) -> None:
        """Nobody here waits for this any more: its sender may let go of its leases."""
        if message.worker is None:
            return
        done = TransferDone(request_id=message.request_id, transfer_id=message.transfer_id)
        try:
            await endpoint.announce(self._runtime.bus, subjects.split_prefill(message.worker), done)
        except BusError as error:
            self._runtime.log.warning("prefill can't be told that the transfer is over", error=str(error))

    def _build_parts(self, codec: TextCodec) -> Parts:
        runtime, station = self._runtime, self._station
        tracer = runtime.telemetry.tracer
        recorder = ChunkRecorder(tracer, station.node, self._metrics.count_chunk)
        return Parts(
            worker=runtime.worker_id,
            config=self._config,
            bus=runtime.bus,
            pool=station.pool,
            codec=codec,
            sequences=station.sequences,
            places=Places(self._config.max_requests),
            peers=self._peers,
            puller=ChunkPuller(recorder),
            colocated=Colocated(runtime.bus, PromptComputer(tracer, recorder, runtime.log), runtime.log),
            prefill_meter=self._prefill_meter,
            decode_meter=self._decode_meter,
            standing=self._standing,
            tracer=tracer,
            metrics=self._metrics,
            log=runtime.log,
        )

    def _on_bug(self, error: BaseException) -> None:
        self._runtime.log.error("a half's task failed", exc_info=error)
