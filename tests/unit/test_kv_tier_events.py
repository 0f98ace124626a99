"""Chunk events: whatever fails, a follower ends up knowing exactly what the pool holds, in bounded memory."""

import asyncio
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.schemas.chunks import ChunkEvent, ChunkEvicted, ChunkMeta, ChunkRegistered, EvictReason, NodeCleared
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from support.wait import until

NODE = NodeId("node-a")
NUM_KEYS = 6


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def meta(number: int) -> ChunkMeta:
    return ChunkMeta(
        key=key(number),
        index=0,
        num_tokens=1,
        num_bytes=1,
        checksum=b"",
        request_id=RequestId("r"),
        created_ns=1,
    )


class Follower:
    """Believes what it is told."""

    def __init__(self) -> None:
        self.held: set[ChunkKey] = set()
        self.events: list[ChunkEvent] = []

    def hear(self, event: ChunkEvent) -> None:
        self.events.append(event)
        match event:
            case NodeCleared():
                self.held.clear()
            case ChunkRegistered():
                self.held.update(chunk.key for chunk in event.chunks)
            case ChunkEvicted():
                self.held.difference_update(event.keys)


STEP = st.one_of(
    st.tuples(st.just("register"), st.integers(0, NUM_KEYS - 1)),
    st.tuples(st.sampled_from(["evict", "corrupt"]), st.integers(0, NUM_KEYS - 1)),
    st.tuples(st.sampled_from(["publish", "lost answer", "lost event"]), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_the_follower_agrees_in_the_end_whatever_was_lost_on_the_way(steps: Sequence[tuple[str, int]]) -> None:
    outbox, follower, held = Outbox(NODE, 7), Follower(), set[ChunkKey]()
    for step, number in steps:
        if step == "register":
            held.add(key(number))
            outbox.registered([meta(number)])
        elif step in ("evict", "corrupt") and key(number) in held:
            held.discard(key(number))
            outbox.evicted([key(number)], EvictReason.CAPACITY if step == "evict" else EvictReason.CORRUPT)
        elif (event := outbox.next_event()) is not None:
            outbox.telling(event)
            if step != "lost event":
                follower.hear(event)
            if step == "publish":
                outbox.told(event)
        assert outbox.pending <= 2 * NUM_KEYS
    while (event := outbox.next_event()) is not None:
        outbox.telling(event)
        follower.hear(event)
        outbox.told(event)
    assert follower.held == held
    assert isinstance(follower.events[0], NodeCleared)
    assert all(event.epoch == 7 for event in follower.events)


def test_what_came_and_went_untold_is_not_told() -> None:
    outbox = Outbox(NODE, 7)
    outbox.told(NodeCleared(node=NODE, epoch=7))
    outbox.registered([meta(0), meta(1)])
    outbox.evicted([key(0)], EvictReason.CAPACITY)
    event = outbox.next_event()
    assert isinstance(event, ChunkRegistered)
    assert [chunk.key for chunk in event.chunks] == [key(1)]


def test_news_that_comes_while_an_event_is_published_is_kept() -> None:
    outbox = Outbox(NODE, 7)
    outbox.told(NodeCleared(node=NODE, epoch=7))
    outbox.registered([meta(0)])
    event = outbox.next_event()
    assert event is not None
    outbox.telling(event)
    outbox.evicted([key(0)], EvictReason.CAPACITY)
    outbox.told(event)
    after = outbox.next_event()
    assert isinstance(after, ChunkEvicted)
    assert after.keys == (key(0),)


def test_many_chunks_go_in_events_of_bounded_size() -> None:
    outbox = Outbox(NODE, 7)
    outbox.told(NodeCleared(node=NODE, epoch=7))
    many = [meta(number % 256) for number in range(256)]
    more = [msgspec.structs.replace(many[0], key=ChunkKey(bytes([1]) * 31 + bytes([n]))) for n in range(50)]
    outbox.registered(many + more)
    sizes = []
    while (event := outbox.next_event()) is not None:
        assert isinstance(event, ChunkRegistered)
        sizes.append(len(event.chunks))
        outbox.told(event)
    assert sizes == [256, 49], "one of the fifty has a key that was there already"


async def test_a_failing_broker_is_tried_until_it_stores_and_order_holds() -> None:
    follower, failures = Follower(), list[Exception]()
    broken = [True]

    async def publish(event: ChunkEvent) -> None:
        if broken[0]:
            raise ConnectionError("the broker is away")
        follower.hear(event)

    announcer = Announcer(Outbox(NODE, 7), publish, failures.append, max_retry_s=0.05)
    task = asyncio.create_task(announcer.run())
    announcer.registered([meta(0), meta(1)])
    await until(lambda: len(failures) >= 3)
    assert not await announcer.quiet(0.01)
    announcer.evicted([key(0)], EvictReason.CAPACITY)
    broken[0] = False
    assert await announcer.quiet(5)
    announcer.evicted([key(1)], EvictReason.CAPACITY)
    assert await announcer.quiet(5)
    assert [type(event) for event in follower.events] == [NodeCleared, ChunkRegistered, ChunkEvicted]
    assert follower.held == set()
    assert announcer.num_failures == len(failures)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_chunk_that_others_believe_in_is_told_gone_although_it_was_never_told_registered() -> None:
    outbox = Outbox(NODE, 1)
    cleared = outbox.next_event()
    assert isinstance(cleared, NodeCleared)
    outbox.told(cleared)
    outbox.evicted([key(1)], EvictReason.CAPACITY)
    assert outbox.next_event() is None
    outbox.doubted([key(1)])
    event = outbox.next_event()
    assert event == ChunkEvicted(node=NODE, epoch=1, keys=(key(1),), reason=EvictReason.CAPACITY)
    assert event is not None
    outbox.told(event)
    assert outbox.next_event() is None
