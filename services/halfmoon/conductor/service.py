"""The shell of the conductor: it builds the parts, and keeps their tasks."""

import asyncio
import os
import time
from collections.abc import Coroutine

from halfmoon.bus.errors import BusError
from halfmoon.conductor.book import Book
from halfmoon.conductor.claims import Claims
from halfmoon.conductor.config import ConductorConfig
from halfmoon.conductor.copies import Copies
from halfmoon.conductor.dispatch import Dispatcher
from halfmoon.conductor.ears import Ears
from halfmoon.conductor.flights import Flights
from halfmoon.conductor.front import DURABLE, Front
from halfmoon.conductor.gate import Gate
from halfmoon.conductor.hot import HotIndex
from halfmoon.conductor.indexer import Indexer
from halfmoon.conductor.instruments import Instruments
from halfmoon.conductor.intake import Reader
from halfmoon.conductor.members import Members
from halfmoon.conductor.owner import Owner
from halfmoon.conductor.partners import Lonely
from halfmoon.conductor.parts import Parts
from halfmoon.conductor.pins import PinWatch
from halfmoon.conductor.planning import Planner
from halfmoon.conductor.prompt_keys import PromptCutter
from halfmoon.conductor.reporting import Reporter
from halfmoon.conductor.requests import OpenRequests
from halfmoon.conductor.speaker import Speaker
from halfmoon.conductor.state import RequestState
from halfmoon.conductor.texts import Texts
from halfmoon.lifecycle import VERSION, Runtime, StartupError
from halfmoon.scheduling.contract import Costs
from halfmoon.scheduling.copies import CopyLimits
from halfmoon.scheduling.costs.fitted import Fitted
from halfmoon.scheduling.demand import Demand
from halfmoon.scheduling.estimates import Assumed
from halfmoon.scheduling.policies import policy_named
from halfmoon.scheduling.replication import ReplicaPlanner
from halfmoon.scheduling.slo import Admission
from halfmoon.scheduling.waiting import WaitingRoom
from halfmoon.schemas import subjects
from halfmoon.schemas.members import HEARTBEAT_INTERVAL_S, MemberState, ServiceHeartbeat
from halfmoon.tasks import ended
from halfmoon.text import TextError

MAX_AT_THE_DOOR = 64
"""Requests taken beyond those that have a place: it is decided who of all has none, not who comes too late."""


class Conductor:
    """See `halfmoon.lifecycle.Service` for its life."""

    def __init__(self, runtime: Runtime[ConductorConfig]) -> None:
        self._runtime = runtime
        self.telemetry = runtime.telemetry
        self._config = runtime.config
        self._state = MemberState.LOADING
        self._tasks: list[asyncio.Task[None]] = []
        self._front: Front | None = None
        self._cutter: PromptCutter | None = None
        config, bus, log = runtime.config, runtime.bus, runtime.log
        self.instruments = Instruments(runtime.metrics)
        self.members = Members()
        self.hot = HotIndex()
        self.lonely = Lonely()
        self.flights = Flights()
        self.requests = OpenRequests()
        classes = config.service_classes
        self.book = Book(lambda: WaitingRoom(classes, config.tenant_weights, config.max_waiting))
        self.indexer = Indexer(
            bus, log, live=lambda: self.members.cluster().nodes, page_timeout_s=config.snapshot_timeout_s
        )
        self.pins = PinWatch(bus, log, self.members.latest_order)
        self.copies = Copies(
            bus,
            runtime.worker_id,
            self.members,
            lambda: self.indexer.index if self.indexer.is_current else None,
            ReplicaPlanner(
                CopyLimits(
                    max_copies=config.max_replicas,
                    uses_per_copy=config.uses_per_copy,
                    pinned_copies=config.pin_replicas,
                ),
                Demand(config.demand_half_life_s),
                config.replication_bytes_per_s,
            ),
            self.instruments,
            log,
            prefetch_confidence=config.prefetch_confidence,
            pinned=lambda: self.pins.runs,
        )
        self.fitted = Fitted(
            Assumed(prefill_tokens_per_s=config.assumed_prefill_tokens_per_s, pull_bytes_per_s=config.pull_bytes_per_s),
            self.members.traffic,
        )
        self._costs = Costs(
            estimates=self.fitted,
            max_waiting_per_worker=config.max_waiting_per_worker,
            retry_after_s=config.retry_after_s,
            num_choices=config.split_attempts,
        )
        self._policy = policy_named(config.policy, balancing_threshold=config.balancing_threshold)
        self._reporter = Reporter(
            config.policy, self._policy, self.fitted, self.instruments.forecasts, self.instruments
        )
        self.gate = Gate(
            self.book,
            self.requests,
            Admission(config.admission, self._costs.estimates, self.book.outlook),
            classes,
            self.instruments,
            runtime.telemetry.tracer,
            max_in_flight=config.max_in_flight,
            max_waiting_per_worker=config.max_waiting_per_worker,
            retry_after_s=config.retry_after_s,
            is_draining=self._is_draining,
        )
        self._claims = Claims(bus, self.members, self.requests, self.flights)
        self._ears = Ears(
            bus,
            runtime.worker_id,
            self.members,
            self.hot,
            self.fitted,
            self.flights,
            self.book,
            self.gate,
            self.requests,
            self.instruments,
            log,
        )

    async def start(self) -> None:
        """Raises `StartupError` where the tokenizer can't be loaded, or the broker has no JetStream."""
        try:
            texts = await Texts.load(self._config.model, self._config.model_name)
        except TextError as error:
            raise StartupError(str(error)) from error
        await self._ears.open()
        await self._claims.open()
        self._keep(self.indexer.run(), "index")
        self._keep(self._look_after_members(), "members")
        self._keep(self.pins.run(), "pins")
        self._keep(self._stay_in_progress(), "in-progress acks")
        front = self._front = self._build_front(texts)
        try:
            service = await self._runtime.bus.add_service("halfmoon-conductor", VERSION, "Places requests on workers.")
            record = service.add_endpoint("generate", subjects.GENERATE_ALL, DURABLE)
            await self.copies.open(service)
            assert self._cutter is not None
            await self._cutter.open(self._runtime.bus, service)
            self._keep(self.copies.run(self._config.replicate_every_s), "copies")
            # Heartbeats first: a request that comes before them would be told that nobody is there.
            await asyncio.sleep(self._config.listen_first_s)
            await front.open(
                record,
                ack_wait_s=self._config.ack_wait_s,
                max_open=self._config.max_in_flight + self._config.max_waiting + MAX_AT_THE_DOOR,
            )
        except BusError as error:
            raise StartupError(f"the conductor can't take requests: {error}") from error
        self._state = MemberState.SERVING

    async def drain(self) -> None:
        """Takes no more; hands back what waits, finishes what it placed, and hands back what of that takes longer than
        most of the time it has."""
        self._state = MemberState.DRAINING
        if self._front is None:
            return
        for request in self.requests:
            if request.state is RequestState.WAITING:
                request.hand_back()
        timeout_s = self._config.drain_timeout_s
        hand_back = asyncio.get_running_loop().call_later(0.8 * timeout_s, self._hand_back)
        try:
            await self._front.drain(timeout_s)
        finally:
            hand_back.cancel()

    async def stop(self) -> None:
        self._state = MemberState.DRAINING
        if self._front is not None:
            await self._front.close()
        await self._ears.close()
        await self._claims.close()
        await self.copies.close()
        if self._cutter is not None:
            await self._cutter.close()
        tasks, self._tasks = self._tasks, []
        await ended(*tasks)

    def heartbeat(self) -> ServiceHeartbeat:
        return ServiceHeartbeat(
            worker=self._runtime.worker_id,
            service=self._runtime.service,
            started_ns=self._runtime.started_ns,
            state=self._state,
            pid=os.getpid(),
            prompt_tokens=self.instruments.prompt_tokens,
            cached_tokens=self.instruments.cached_tokens,
            scheduling=self._reporter.report(num_open=len(self.requests)),
        )

    def _build_front(self, texts: Texts) -> Front:
        config, bus, log = self._config, self._runtime.bus, self._runtime.log
        planner = Planner(
            self._policy,
            self._costs,
            self.members,
            lambda: self.indexer.index,
            self.hot,
            config.tenant_salts,
            self.instruments,
            self.copies,
        )
        self._cutter = PromptCutter(self.members, planner, texts)
        dispatcher = Dispatcher(
            bus,
            self._runtime.worker_id,
            self.members,
            self.flights,
            self.book,
            self.instruments,
            log,
            timeout_s=config.split_timeout_s,
            max_attempts=config.split_attempts,
        )
        speaker = Speaker(bus, self.instruments)
        owner = Owner(
            Parts(
                config=config,
                planner=planner,
                gate=self.gate,
                dispatcher=dispatcher,
                members=self.members,
                flights=self.flights,
                requests=self.requests,
                speaker=speaker,
                texts=texts,
                tracer=self._runtime.telemetry.tracer,
                instruments=self.instruments,
                log=log,
            )
        )
        reader = Reader(config.request_timeout_s)
        return Front(bus, reader, owner, self.requests, speaker, self.instruments, log, self._is_draining)

    def _is_draining(self) -> bool:
        return self._state is MemberState.DRAINING

    def _hand_back(self) -> None:
        for request in self.requests:
            request.hand_back()

    def _keep(self, run: Coroutine[None, None, None], name: str) -> None:
        """Own a task that must not end by itself."""
        task = asyncio.create_task(run, name=f"conductor {name}")
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._runtime.fail(f"the task {task.get_name()!r} failed: {error!r}")

    async def _look_after_members(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            self._ears.expire_members()
            self.instruments.index_chunks.set(len(self.indexer.index))
            self.instruments.hot(self.hot.num_chunks())
            self._reporter.refresh()
            self.instruments.waiting(self.book.waiting())
            self._look_for_lonely_workers()

    def _look_for_lonely_workers(self) -> None:
        num_alone, news = self.lonely.look(self.members.cluster().workers, time.monotonic())
        self.instruments.alone.set(num_alone)
        for load in news:
            self._runtime.log.warning(
                "a worker has no partner: nobody of the other role serves its model with the same KV",
                worker=load.worker,
                role=load.role.value,
                model=load.card.name,
            )

    async def _stay_in_progress(self) -> None:
        """Tell the broker, well within `ack_wait_s`, that what is open here is still being worked on."""
        while True:
            await asyncio.sleep(self._config.ack_wait_s / 3)
            for request in self.requests:
                try:
                    await request.delivery.in_progress()
                except BusError as error:
                    self._runtime.log.warning("the broker can't be told of work in progress", error=str(error))
                    break
