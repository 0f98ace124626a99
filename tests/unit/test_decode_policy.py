"""Decode's pure parts: what to do about a prompt's KV, in whatever order it is told; early announcements."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from halfmoon.chunks.plan import plan_chunks
from halfmoon.decode.early import EarlyBuffer
from halfmoon.decode.policy import Generate, Pull, Recompute, Wait, is_lost, next_step, num_computed
from halfmoon.decode.state import HALF_TABLE, HalfEvent, HalfState, KvProgress
from halfmoon.machine import IllegalTransition, Machine
from halfmoon.prefill.policy import hold_until_ns
from halfmoon.prefill.state import HALF_TABLE as PREFILL_TABLE
from halfmoon.prefill.state import HalfState as PrefillState
from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import NodeId, RequestId, TransferId
from halfmoon.schemas.kv_tier import ChunkSource
from halfmoon.schemas.splits import KvFailed, KvReady, ReadyChunk
from halfmoon.schemas.wire import Error, ErrorCode

REQUEST, TRANSFER = RequestId("req-1"), TransferId("xfer-1")
SOURCE = ChunkSource(node=NodeId("node-a"), epoch=1)
CHUNKS = plan_chunks(b"r" * 32, range(35), chunk_tokens=8, payload_bytes=(4).__mul__, transfer_id=TRANSFER)


def ready(*indexes: int, num_chunks: int = len(CHUNKS), node: str = "node-a") -> KvReady:
    return KvReady(
        request_id=REQUEST,
        transfer_id=TRANSFER,
        source=ChunkSource(node=NodeId(node), epoch=1),
        chunks=tuple(
            ReadyChunk(
                key=CHUNKS[index].key,
                index=index,
                num_tokens=CHUNKS[index].num_tokens,
                num_bytes=CHUNKS[index].num_bytes,
                outcome=ChunkOutcome.COMPUTED,
            )
            for index in indexes
        ),
        num_chunks=num_chunks,
        cached_tokens=0,
    )


FAILED = KvFailed(
    request_id=REQUEST, transfer_id=TRANSFER, error=Error(code=ErrorCode.NO_SPACE, message="the pool is full")
)


def test_the_plan_of_35_tokens() -> None:
    assert [chunk.num_tokens for chunk in CHUNKS] == [8, 8, 8, 8, 2]


def test_waits_then_pulls_what_is_announced_without_gaps() -> None:
    progress = KvProgress(CHUNKS)
    assert next_step(progress) == Wait()
    progress.announce(ready(1, 3))
    assert next_step(progress) == Wait()
    progress.announce(ready(0))
    assert next_step(progress) == Pull(((CHUNKS[0], SOURCE), (CHUNKS[1], SOURCE)))
    progress.num_loaded = 2
    assert next_step(progress) == Wait()
    assert progress.num_loaded_tokens == 16
    progress.num_loaded = len(CHUNKS)
    assert next_step(progress) == Generate()
    assert progress.num_loaded_tokens == 34


def test_after_a_failure_loads_what_there_is_then_recomputes() -> None:
    progress = KvProgress(CHUNKS)
    progress.announce(ready(0))
    progress.fail(FAILED)
    assert isinstance(next_step(progress), Pull)
    progress.num_loaded = 1
    assert next_step(progress) == Recompute("the pool is full")


def test_a_lost_chunk_makes_those_behind_it_useless() -> None:
    progress = KvProgress(CHUNKS)
    progress.announce(ready(0, 1, 2))
    progress.num_loaded = 1
    progress.lost = "chunk 1 is gone"
    assert next_step(progress) == Recompute("chunk 1 is gone")


def test_the_latest_announcement_of_a_chunk_says_where_it_is() -> None:
    progress = KvProgress(CHUNKS)
    progress.announce(ready(0))
    progress.announce(ready(0, node="node-c"))
    step = next_step(progress)
    assert isinstance(step, Pull)
    assert step.chunks[0][1].node == "node-c"


@pytest.mark.parametrize("num_chunks", [0, 4, 9])
def test_another_cut_of_the_prompt_is_not_waited_for(num_chunks: int) -> None:
    progress = KvProgress(CHUNKS)
    progress.announce(ready(0, num_chunks=num_chunks))
    assert isinstance(next_step(progress), Recompute)


def test_a_chunk_of_another_prompt_is_not_loaded() -> None:
    other = plan_chunks(b"x" * 32, range(35), chunk_tokens=8, payload_bytes=(4).__mul__, transfer_id=TRANSFER)
    progress = KvProgress(other)
    progress.announce(ready(0))
    assert progress.sources == {}
    assert isinstance(next_step(progress), Recompute)


@given(st.permutations([*range(len(CHUNKS)), "fail"]), st.sets(st.integers(0, len(CHUNKS) - 1)))
def test_any_order_ends_with_the_longest_prefix_that_can_be_had(order: list[int | str], gone: set[int]) -> None:
    """Each message once, in any order; chunks in `gone` can't be pulled. A naive model says how far it comes."""
    progress = KvProgress(CHUNKS)
    ended: Generate | Recompute | None = None
    failed = False
    told: set[int] = set()
    for message in order:
        if isinstance(message, int):
            told.add(message)
            progress.announce(ready(message))
        else:
            failed = True
            progress.fail(FAILED)
        for _ in range(2 * len(CHUNKS)):
            step = next_step(progress)
            if not isinstance(step, Pull):
                break
            for chunk, _ in step.chunks:
                if chunk.index in gone:
                    progress.lost = "gone"
                    break
                progress.num_loaded += 1
        if isinstance(step, Generate | Recompute):
            ended = step
            break
    assert ended is not None
    reach = next((index for index in range(len(CHUNKS)) if index not in told or index in gone), len(CHUNKS))
    assert progress.num_loaded == reach
    assert isinstance(ended, Generate) == (reach == len(CHUNKS))
    assert failed or reach == len(CHUNKS) or reach in gone


@pytest.mark.parametrize(("loaded", "num_tokens", "start"), [(0, 1, 0), (8, 8, 7), (8, 9, 8), (34, 35, 34), (3, 35, 3)])
def test_the_last_token_is_always_computed(loaded: int, num_tokens: int, start: int) -> None:
    assert num_computed(loaded, num_tokens) == start


def test_a_worker_is_lost_after_its_time_and_grace() -> None:
    assert not is_lost(3.0, 2.0, 1.0)
    assert is_lost(3.01, 2.0, 1.0)


def test_kv_is_held_until_the_earlier_of_both_bounds() -> None:
    assert hold_until_ns(1_000, 10**12, 1.0) == 1_000 + 10**9
    assert hold_until_ns(1_000, 2_000, 1.0) == 2_000


def early(transfer: str, *indexes: int) -> KvReady:
    message = ready(*indexes)
    return KvReady(
        request_id=REQUEST,
        transfer_id=TransferId(transfer),
        source=SOURCE,
        chunks=message.chunks,
        num_chunks=5,
        cached_tokens=0,
    )


def test_early_announcements_are_kept_in_order_and_given_once() -> None:
    buffer = EarlyBuffer(max_transfers=4, ttl_s=10)
    first, second = early("a", 0), early("a", 1)
    assert buffer.put(first, 0.0) == buffer.put(second, 1.0) == []
    assert buffer.take(TransferId("a")) == [first, second]
    assert buffer.take(TransferId("a")) == []
    assert len(buffer) == 0


def test_early_announcements_are_bounded_in_transfers_chunks_and_time() -> None:
    buffer = EarlyBuffer(max_transfers=2, ttl_s=10, max_chunks=3)
    a, b, c = early("a", 0), early("b", 0), early("c", 0)
    assert buffer.put(a, 0.0) == buffer.put(b, 1.0) == []
    assert buffer.put(c, 2.0) == [a]
    more = early("c", 1, 2, 3)
    assert buffer.put(more, 3.0) == [c, more]
    assert buffer.expire(11.0) == []
    assert buffer.expire(11.1) == [b]
    assert len(buffer) == 0
    assert buffer.dropped == 3


@pytest.mark.parametrize("state", list(HalfState))
@pytest.mark.parametrize("event", list(HalfEvent))
def test_the_table_is_all_there_is(state: HalfState, event: HalfEvent) -> None:
    machine = Machine(HALF_TABLE, state)
    if (state, event) in HALF_TABLE:
        assert machine.fire(event) is HALF_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition):
            machine.fire(event)
        assert machine.state is state


def test_every_state_can_end_and_ends_are_final() -> None:
    ends = {HalfState.FINISHED, HalfState.FAILED, HalfState.CANCELLED}
    assert {state for state, _ in HALF_TABLE} == set(HalfState) - ends
    prefill_ends = {PrefillState.DONE, PrefillState.FAILED, PrefillState.CANCELLED}
    assert {state for state, _ in PREFILL_TABLE} == set(PrefillState) - prefill_ends
    for state in set(HalfState) - ends:
        assert {HALF_TABLE[state, HalfEvent.FAIL], HALF_TABLE[state, HalfEvent.CANCEL]} <= ends
