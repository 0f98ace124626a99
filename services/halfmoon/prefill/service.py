"""The shell of the prefill service: halves in, each run as a task of its own."""

import time
from typing import assert_never

from halfmoon.bus import endpoint
from halfmoon.bus.endpoint import Endpoint, Envelope
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.protocol import ServiceRecord
from halfmoon.chunks.plan import plan_chunks
from halfmoon.engine.contract import Engine
from halfmoon.lifecycle import VERSION, Runtime
from halfmoon.prefill.config import PrefillConfig
from halfmoon.prefill.half import Parts, PrefillRun
from halfmoon.prefill.metrics import PrefillMetrics
from halfmoon.prefill.policy import refusal
from halfmoon.prefill.state import HalfState
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import TransferId
from halfmoon.schemas.members import MemberState, WorkerHeartbeat
from halfmoon.schemas.requests import RequestCancel
from halfmoon.schemas.splits import HalfAccepted, PrefillHalf, PrefillInbox, Role, TransferDone
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.worker.admission import Load
from halfmoon.worker.chunk_records import ChunkRecorder
from halfmoon.worker.engine import build_engine
from halfmoon.worker.jobs import Jobs
from halfmoon.worker.line import Places
from halfmoon.worker.meters import PrefillMeter
from halfmoon.worker.peers import PeerWatch
from halfmoon.worker.prompt import PromptComputer
from halfmoon.worker.recent import RecentTransfers
from halfmoon.worker.station import Station

Key = tuple[TransferId, int]
"""A transfer, and the attempt at it."""

STOPPING = "this worker stops; the prompt is computed elsewhere"


class Prefill:
    """See `halfmoon.lifecycle.Service` for its life. `engine` is built from the settings unless given."""

    def __init__(self, runtime: Runtime[PrefillConfig], engine: Engine | None = None) -> None:
        config = runtime.config
        self._runtime = runtime
        self._config = config
        self._metrics = PrefillMetrics(runtime.metrics)
        self._station = Station(runtime, engine or build_engine(config), Role.PREFILL)
        recorder = ChunkRecorder(runtime.telemetry.tracer, self._station.node, self._metrics.count_chunk)
        self._peers = PeerWatch(runtime.bus)
        self._parts = Parts(
            worker=runtime.worker_id,
            config=config,
            bus=runtime.bus,
            pool=self._station.pool,
            sequences=self._station.sequences,
            places=Places(config.max_requests),
            peers=self._peers,
            computer=PromptComputer(runtime.telemetry.tracer, recorder, runtime.log),
            meter=PrefillMeter(),
            tracer=runtime.telemetry.tracer,
            metrics=self._metrics,
            log=runtime.log,
        )
        self._runs: dict[Key, PrefillRun] = {}
        self._recent = RecentTransfers()
        self._jobs: Jobs[Key] = Jobs(self._on_bug)
        self._endpoints: list[Endpoint] = []
        self._record: ServiceRecord | None = None

    async def start(self) -> None:
        await self._station.start()
        await self._peers.start()
        bus, worker = self._runtime.bus, self._runtime.worker_id
        self._record = await bus.add_service("halfmoon-prefill", VERSION, "Computes prompts' KV.")
        subject = subjects.split_prefill(worker)
        half = self._record.add_endpoint("half", subject)
        self._endpoints = [
            await endpoint.serve(bus, subject, PrefillInbox, self._on_message, record=half),
            await endpoint.serve(bus, subjects.CANCEL, RequestCancel, self._on_message),
        ]

    async def drain(self) -> None:
        self._station.pulse.draining()
        await self._jobs.drain()

    async def stop(self) -> None:
        self._station.pulse.draining()
        endpoints, self._endpoints = self._endpoints, []
        for each in endpoints:
            await each.unsubscribe()
        if self._record is not None:
            await self._record.stop()
        await self._jobs.close(STOPPING)
        await self._peers.stop()
        await self._station.stop()

    def heartbeat(self) -> WorkerHeartbeat:
        runs = list(self._runs.values())
        num_waiting = sum(run.state is HalfState.QUEUED for run in runs)
        num_running = sum(run.state in (HalfState.ACQUIRING, HalfState.COMPUTING) for run in runs)
        self._metrics.running.set(len(runs))
        return self._station.pulse.beat(
            self._station.stats(),
            num_running=num_running,
            num_waiting=num_waiting,
            queued_tokens=sum(run.num_left_tokens for run in runs),
            requests=[run.progress() for run in runs if run.state is HalfState.COMPUTING],
            queued_pairs=sum(run.num_left_pairs for run in runs),
            prefills=self._parts.meter.take(),
        )

    async def _on_message(self, message: PrefillInbox, envelope: Envelope) -> HalfAccepted | None:
        match message:
            case PrefillHalf():
                return self._accept(message, envelope)
            case TransferDone():
                for run in self._of_transfer(message.transfer_id):
                    run.let_go()
            case RequestCancel():
                error = Error(code=ErrorCode.CANCELLED, message=message.reason)
                for run in list(self._runs.values()):
                    if run.half.request_id == message.request_id:
                        run.job.stop(error)
            case _:
                assert_never(message)
        return None

    def _accept(self, half: PrefillHalf, envelope: Envelope) -> HalfAccepted:
        """Raises `RemoteError`: busy, or never to be served here."""
        accepted = HalfAccepted(request_id=half.request_id)
        if self._recent.has(half.transfer_id, half.attempt):
            return accepted
        card = self._station.sequences.card
        load = Load(
            num_halves=sum(run.state is not HalfState.HANDING_OVER for run in self._runs.values()),
            max_requests=self._config.max_requests,
            max_queue=self._config.max_queue,
            draining=self._station.pulse.state is MemberState.DRAINING,
        )
        error = refusal(half, card, load, self._station.sequences.stats().total_tokens)
        if error is not None:
            self._metrics.refused.labels(error.code.value).inc()
            raise RemoteError(error)
        for older in self._of_transfer(half.transfer_id):
            older.let_go()
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
        run = PrefillRun(half, chunks, envelope.context, deadline_ns, self._parts)
        key = (half.transfer_id, half.attempt)
        self._recent.add(*key)
        self._runs[key] = run
        self._jobs.start(key, run.job, self._run(key, run), name=f"prefill {half.transfer_id}")
        return accepted

    async def _run(self, key: Key, run: PrefillRun) -> None:
        try:
            await run.run()
        finally:
            del self._runs[key]

    def _of_transfer(self, transfer_id: TransferId) -> list[PrefillRun]:
        return [run for (each, _), run in self._runs.items() if each == transfer_id]

    def _on_bug(self, error: BaseException) -> None:
        self._runtime.log.error("a half's task failed", exc_info=error)
