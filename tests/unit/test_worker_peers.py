"""Whether a worker at the other end is still there: silence, restarts, goodbyes, and a broker that is away."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.prefill.policy import is_gone
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.members import MEMBER_LOST_AFTER_S, Goodbye, Heartbeat, MemberState, WorkerHeartbeat
from halfmoon.schemas.splits import Role
from halfmoon.worker.peers import PeerWatch, Watched
from support.wait import until

PEER, SELF = WorkerId("decode-1"), WorkerId("prefill-1")


class Stage:
    """A watch whose time is told, and whose heartbeats are sent by hand."""

    def __init__(self, bus: MemoryBus) -> None:
        self.now_s = 100.0
        self.bus = bus
        self.watch = PeerWatch(bus, lambda: self.now_s)

    async def beat(self, worker: WorkerId, started_ns: int = 1, *, at_s: float | None = None) -> None:
        await self._say(
            worker,
            WorkerHeartbeat(
                worker=worker,
                role=Role.DECODE,
                node=NodeId("node-b"),
                started_ns=started_ns,
                state=MemberState.SERVING,
            ),
            at_s,
        )

    async def goodbye(self, at_s: float) -> None:
        await self._say(PEER, Goodbye(worker=PEER), at_s)

    async def _say(self, worker: WorkerId, heartbeat: Heartbeat, at_s: float | None) -> None:
        self.now_s = self.now_s if at_s is None else at_s
        before = self.watch.num_heard
        await self.bus.publish(subjects.heartbeat(worker), msgspec.msgpack.encode(heartbeat))
        await until(lambda: self.watch.num_heard > before, 5, what="the heartbeat is heard")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    bus = MemoryBus(MemoryBroker())
    stage = Stage(bus)
    await stage.watch.start()
    yield stage
    await stage.watch.stop()
    await bus.close()


def gone(watched: Watched) -> bool:
    return is_gone(watched.silent_s, was_restarted=watched.was_restarted)


async def both(stage: Stage, *seconds: float) -> None:
    for at_s in seconds:
        await stage.beat(SELF, at_s=at_s)
        await stage.beat(PEER)


async def test_silence_counts_while_others_are_heard(stage: Stage) -> None:
    with stage.watch.watching(PEER) as watched:
        await both(stage, 100.5, 101.0)
        assert watched.silent_s == 0
        for at_s in (101.5, 102.0, 102.5, 103.0):
            await stage.beat(SELF, at_s=at_s)
        assert watched.silent_s == MEMBER_LOST_AFTER_S
        assert not gone(watched)
        await stage.beat(SELF, at_s=103.25)
        assert gone(watched)
        await stage.beat(PEER)
        assert not gone(watched)
    assert len(stage.watch) == 0


async def test_one_that_was_never_heard_is_given_its_time(stage: Stage) -> None:
    with stage.watch.watching(PEER) as watched:
        for at_s in (100.5, 101.0, 101.5, 102.0):
            await stage.beat(SELF, at_s=at_s)
        assert not gone(watched)
        await stage.beat(SELF, at_s=102.5)
        assert gone(watched)


async def test_a_restart_is_seen_by_those_who_watched_before_it(stage: Stage) -> None:
    with stage.watch.watching(PEER) as early:
        await stage.beat(PEER, 1)
        assert not early.was_restarted
        await stage.beat(PEER, 2)
        with stage.watch.watching(PEER) as late:
            await stage.beat(PEER, 2)
            assert (early.was_restarted, late.was_restarted) == (True, False)
            assert gone(early)
            assert not gone(late)


async def test_a_goodbye_is_as_good_as_silence(stage: Stage) -> None:
    with stage.watch.watching(PEER) as watched:
        await both(stage, 100.5)
        await stage.goodbye(100.6)
        await stage.beat(SELF, at_s=100.7)
        assert gone(watched)


async def test_while_nobody_is_heard_nobody_is_lost(stage: Stage) -> None:
    with stage.watch.watching(PEER) as watched:
        await both(stage, 100.5)
        stage.now_s = 110.5
        assert watched.silent_s == 0
        # The first to be heard again is another one.
        await stage.beat(SELF)
        assert watched.silent_s == 0
        await stage.beat(PEER, at_s=110.7)
        assert not gone(watched)


async def test_another_sign_of_life_counts(stage: Stage) -> None:
    with stage.watch.watching(PEER) as watched:
        for at_s in (100.5, 101.0, 101.5, 102.0):
            await stage.beat(SELF, at_s=at_s)
        stage.watch.hear(PEER)
        await stage.beat(SELF, at_s=102.5)
        assert watched.silent_s == 0.5
    stage.watch.hear(PEER)
    assert len(stage.watch) == 0
