"""Exactly one terminal message per request, whatever workers, clients and conductors do, in any order.

A real conductor on the memory bus, among workers that accept, refuse, finish, fall silent and come back; clients that
cancel; conductors that stop without a word and are replaced. A worker that is lost says nothing afterwards: that is
what being lost means here (a partition heals into repeats, which token numbers make invisible).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.bus.protocol import Bus
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.splits import DecodeHalf, Role
from halfmoon.schemas.wire import Error, ErrorCode
from support.conductors import BUSY, MODEL, FakeWorker, Stage
from support.wait import until

T = TypeVar("T")
WORKERS = (
    ("p1", Role.PREFILL, "node-a"),
    ("p2", Role.PREFILL, "node-b"),
    ("d1", Role.DECODE, "node-a"),
    ("d2", Role.DECODE, "node-b"),
)
SETTINGS: dict[str, Any] = {"ack_wait_s": 0.3, "adopt_wait_s": 0.1, "listen_first_s": 0.06, "split_timeout_s": 0.2}
NAMES = st.sampled_from([name for name, _, _ in WORKERS])
PICK = st.integers(0, 1000)


class ConductorLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.submitted: list[RequestId] = []
        self.buses: list[Bus] = []
        broker = self.run(self._broker())
        self.num_conductors = 1

        async def make_bus() -> Bus:
            self.buses.append(MemoryBus(broker))
            return self.buses[-1]

        self.stage = Stage(make_bus)
        self.run(self.stage.open(*WORKERS, **SETTINGS))

    async def _broker(self) -> MemoryBroker:
        return MemoryBroker()

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(doing)

    def worker(self, name: str) -> FakeWorker:
        return self.stage.workers[name]

    @property
    def halves(self) -> list[tuple[FakeWorker, RequestId]]:
        return [
            (worker, request_id)
            for name in ("d1", "d2")
            for worker in [self.worker(name)]
            for request_id, half in worker.running.items()
            if isinstance(half, DecodeHalf)
        ]

    async def _breathe(self) -> None:
        """Let what was said be heard."""
        for _ in range(20):
            await asyncio.sleep(0)

    @precondition(lambda self: len(self.submitted) < 8)
    @rule(num_tokens=st.sampled_from([1, 2, 17, 40]))
    def submit(self, num_tokens: int) -> None:
        request_id = RequestId(f"req-{len(self.submitted)}")
        self.submitted.append(request_id)
        request = RequestSubmitted(request_id=request_id, model=MODEL, tokens=tuple(range(num_tokens)))

        async def do() -> None:
            await self.stage.client.submit(request)
            await self._breathe()

        self.run(do())

    @precondition(lambda self: bool(self.halves))
    @rule(pick=PICK, fails=st.booleans())
    def decode_ends(self, pick: int, fails: bool) -> None:
        worker, request_id = self.halves[pick % len(self.halves)]
        error = Error(code=ErrorCode.INTERNAL, message="the engine failed") if fails else None
        self.run(worker.end(request_id, error))

    @precondition(lambda self: bool(self.halves))
    @rule(pick=PICK)
    def decode_generates(self, pick: int) -> None:
        worker, request_id = self.halves[pick % len(self.halves)]

        async def do() -> None:
            await worker.generate(request_id, 5, 6)
            await worker.beat()

        self.run(do())

    @rule(name=NAMES)
    def worker_leaves(self, name: str) -> None:
        async def do() -> None:
            if self.worker(name).is_alive:
                await self.worker(name).leave()
                await self._breathe()

        self.run(do())

    @rule(name=NAMES)
    def worker_restarts(self, name: str) -> None:
        async def do() -> None:
            if self.worker(name).is_alive:
                await self.worker(name).die()
            await self.worker(name).rise()
            await self._breathe()

        self.run(do())

    @rule(name=NAMES, mood=st.sampled_from(["accepts", "refuses", "ignores"]))
    def worker_changes_its_mind(self, name: str, mood: str) -> None:
        self.worker(name).answer = BUSY if mood == "refuses" else None
        self.worker(name).is_silent = mood == "ignores"

    @precondition(lambda self: bool(self.submitted))
    @rule(pick=PICK)
    def client_cancels(self, pick: int) -> None:
        async def do() -> None:
            await self.stage.client.cancel(self.submitted[pick % len(self.submitted)])
            await self._breathe()

        self.run(do())

    @rule()
    def time_passes(self) -> None:
        self.run(asyncio.sleep(0.05))

    @precondition(lambda self: self.num_conductors < 3)
    @rule(is_clean=st.booleans())
    def conductor_is_replaced(self, is_clean: bool) -> None:
        async def do() -> None:
            leaving = self.stage.conductors[-1]
            if is_clean:
                await leaving.drain()
            await leaving.stop()
            self.num_conductors += 1
            await self.stage.add_conductor(f"conductor-{self.num_conductors}", drain_timeout_s=0.2, **SETTINGS)

        self.run(do())

    @invariant()
    def nobody_hears_two_ends(self) -> None:
        for request_id in self.submitted:
            assert len(self.stage.client.ends(request_id)) <= 1, self.stage.client.ends(request_id)

    def teardown(self) -> None:
        try:
            self.run(self._finish())
            for request_id in self.submitted:
                assert len(self.stage.client.ends(request_id)) == 1, (request_id, self.stage.client.events)
        finally:
            self.run(self._close())
            self.loop.close()

    async def _finish(self) -> None:
        """Everybody works again: then every request comes to its end, and none stays in the queue."""
        for worker in self.stage.workers.values():
            worker.answer, worker.is_silent = None, False
            if not worker.is_alive:
                await worker.rise()

        async def end_what_runs() -> None:
            while True:
                for worker, request_id in self.halves:
                    await worker.end(request_id)
                await asyncio.sleep(0.01)

        finishing = asyncio.create_task(end_what_runs())
        try:
            await until(
                lambda: len({end.request_id for end in self.stage.client.ends()}) == len(self.submitted), timeout_s=15
            )
            await until(lambda: len(self.stage.conductors[-1].requests) == 0, timeout_s=15)
        finally:
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)

    async def _close(self) -> None:
        await self.stage.close()
        for bus in self.buses:
            await bus.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert others == []


ConductorLife.TestCase.settings = settings(
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink what waits in real time takes many minutes
    stateful_step_count=18,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestConductorLife = ConductorLife.TestCase
