"""Lines, places and jobs: order, bounds, and cancellation at each point."""

import asyncio
from collections.abc import Coroutine

import pytest

from halfmoon.schemas.ids import TransferId
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.worker.jobs import Job, Jobs
from halfmoon.worker.line import Line, Places
from halfmoon.worker.recent import RecentTransfers
from support.wait import until

STOP = Error(code=ErrorCode.CANCELLED, message="enough")


async def occupy(places: Places, name: str, entered: list[str], leave: asyncio.Event, priority: int = 0) -> None:
    async with places.place(priority=priority):
        entered.append(name)
        await leave.wait()


async def test_places_go_by_priority_then_by_arrival() -> None:
    places, entered = Places(1), list[str]()
    leave = {name: asyncio.Event() for name in "abcd"}
    async with asyncio.TaskGroup() as group:
        for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", 5)):
            group.create_task(occupy(places, name, entered, leave[name], priority))
        await until(lambda: entered == ["a"])
        for name, expected in (("a", "ad"), ("d", "adb"), ("b", "adbc")):
            leave[name].set()
            await until(lambda expected=expected: entered == list(expected))  # type: ignore[misc]
            assert places.num_taken == 1
        leave["c"].set()
    assert places.num_taken == 0


async def test_a_head_start_overtakes_only_those_that_came_within_it() -> None:
    places, entered = Places(1, head_start_s=0.05), list[str]()
    leave = {name: asyncio.Event() for name in ("first", "batch", "soon", "late")}
    clock = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        group.create_task(occupy(places, "first", entered, leave["first"]))
        group.create_task(occupy(places, "batch", entered, leave["batch"], priority=-1))
        group.create_task(occupy(places, "soon", entered, leave["soon"]))
        await until(lambda: entered == ["first"])
        begun_s = clock()
        await until(lambda: clock() > begun_s + 0.06)
        # However many of higher priority come after that time, `batch` is served before them.
        group.create_task(occupy(places, "late", entered, leave["late"]))
        for event in leave.values():
            event.set()
    assert entered == ["first", "soon", "batch", "late"]


async def test_who_leaves_the_line_blocks_nobody() -> None:
    places, entered = Places(1), list[str]()
    leave = {name: asyncio.Event() for name in "abc"}
    tasks = {name: asyncio.create_task(occupy(places, name, entered, leave[name])) for name in "abc"}
    await until(lambda: entered == ["a"])
    tasks["b"].cancel()
    await asyncio.wait([tasks["b"]])
    leave["a"].set()
    await until(lambda: entered == ["a", "c"])
    leave["c"].set()
    await asyncio.wait(tasks.values())
    assert places.num_taken == 0


async def test_the_first_in_line_is_not_overtaken_by_one_that_would_fit() -> None:
    line, room, entered = Line(), [3], list[str]()

    async def enter(name: str, size: int) -> None:
        def attempt() -> bool:
            if size > room[0]:
                return False
            room[0] -= size
            return True

        await line.enter(attempt)
        entered.append(name)

    async with asyncio.TaskGroup() as group:
        for name, size in (("large", 4), ("small", 1)):
            group.create_task(enter(name, size))
        await until(lambda: len(line) == 2)
        assert entered == []
        room[0] = 5
        line.wake()
    assert entered == ["large", "small"]
    assert len(line) == 0


async def ended(record: list[str], job: Job, work: Coroutine[None, None, None]) -> None:
    try:
        job.begin()
        await work
        record.append("done")
    except asyncio.CancelledError:
        work.close()
        record.append(job.stop_error.code if job.stop_error else "stopped")
    job.seal()


async def test_a_job_stopped_before_it_ran_still_reports() -> None:
    jobs: Jobs[str] = Jobs(lambda error: None)
    job, record = Job(), list[str]()
    jobs.start("a", job, ended(record, job, asyncio.sleep(60)), name="a")
    assert job.stop(STOP)
    assert not job.stop(None)
    await jobs.drain()
    assert record == [ErrorCode.CANCELLED]
    assert len(jobs) == 0


async def test_a_sealed_job_is_not_interrupted() -> None:
    jobs: Jobs[str] = Jobs(lambda error: None)
    job, cleaned = Job(), asyncio.Event()

    async def work() -> None:
        job.begin()
        job.seal()
        await cleaned.wait()

    jobs.start("a", job, work(), name="a")
    await asyncio.sleep(0)
    assert not job.stop(STOP)
    cleaned.set()
    await asyncio.wait_for(jobs.drain(), 5)


async def test_close_stops_all_and_a_bug_is_told() -> None:
    bugs: list[BaseException] = []
    jobs: Jobs[str] = Jobs(bugs.append)
    job, record = Job(), list[str]()
    jobs.start("a", job, ended(record, job, asyncio.sleep(60)), name="a")

    async def broken() -> None:
        raise RuntimeError("a bug")

    jobs.start("b", Job(), broken(), name="b")
    with pytest.raises(ValueError, match="runs already"):
        jobs.start("a", Job(), broken(), name="a")
    await jobs.close("stopping")
    await jobs.close("stopping")
    assert record == [ErrorCode.UNAVAILABLE]
    assert [str(bug) for bug in bugs] == ["a bug"]


def test_recent_transfers_know_attempts_and_forget_the_oldest() -> None:
    recent = RecentTransfers(limit=2)
    one, two, three = (TransferId(name) for name in ("one", "two", "three"))
    recent.add(one, 2)
    recent.add(one, 1)
    assert recent.has(one, 1)
    assert recent.has(one, 2)
    assert not recent.has(one, 3)
    recent.add(two, 1)
    recent.add(one, 3)
    recent.add(three, 1)
    assert [recent.has(each, 1) for each in (one, two, three)] == [True, False, True]
