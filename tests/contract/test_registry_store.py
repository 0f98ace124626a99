"""The registry's data in a real etcd: what is written, by whom, and how often."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from halfmoon.registry.etcd import Delete, Etcd, Put, Range, RevisionGone, StoreRefused, StoreUnavailable
from halfmoon.registry.members import LiveHeartbeat
from halfmoon.registry.policy import DropPlacement, NodeRecord, PutNode, PutPlacement, after, plan_event
from halfmoon.registry.store import MAX_PLACEMENTS_PER_KEY, Store
from halfmoon.registry.term import Deposed, OutOfStep, Term
from halfmoon.schemas.ids import NodeId, WorkerId
from support.etcd import EtcdServer
from support.registry import eventually, key, placement, pool_beat, registered

pytestmark = pytest.mark.etcd

ME, OTHER = WorkerId("registry-1"), WorkerId("registry-2")
NODE = NodeId("a")


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"/test-{secrets.token_hex(4)}"


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    async with Etcd((f"127.0.0.1:{etcd_server.port}",)) as client:
        yield client


@pytest.fixture
def store(etcd: Etcd, prefix: str) -> Store:
    return Store(etcd, prefix=prefix, max_txn_ops=1024, write_timeout_s=5.0)


async def elected(store: Store, ttl_s: int = 30) -> Term:
    term = await store.campaign(ME, ttl_s)
    assert term is not None
    await term.load()
    return term


async def test_all_that_is_put_is_found_in_order_and_all_at_once(store: Store) -> None:
    term = await elected(store)
    numbers = range(3000)
    await term.apply(plan_event(registered("a", 5, *numbers), {}), 7)
    asked = [key(number) for number in (*range(1023), 99_999)]
    found = await store.lookup(asked, 5.0)
    assert found == (*((placement("a", 5, number),) for number in range(1023)), ())
    page = await store.snapshot(None, None, 5000, 5.0)
    assert set(page.placements) == {placement("a", 5, number) for number in numbers}
    assert (page.stream_seq, page.cursor) == (7, None)


async def test_keys_with_the_same_beginning_and_odd_node_names_are_kept_apart(store: Store) -> None:
    term = await elected(store)
    names = ["a", "a/b", "ä €", "a\xff", "*"]
    nodes: dict[NodeId, NodeRecord] = {}
    for seq, name in enumerate(names, start=1):
        steps = plan_event(registered(name, 1, 1, 256), nodes)
        nodes = after(nodes, steps)
        await term.apply(steps, seq)
    found = await store.lookup([key(1), key(256), key(0)], 5.0)
    assert [{each.node for each in placements} for placements in found] == [set(names), set(names), set()]


async def test_a_chunk_that_is_everywhere_does_not_make_the_answer_too_large(store: Store) -> None:
    term = await elected(store)
    steps = [PutNode(NodeRecord(node=NodeId(f"n{i}"), epoch=1)) for i in range(40)]
    await term.apply([*steps, *(PutPlacement(placement(f"n{i}", 1, 1)) for i in range(40))], 1)
    assert len((await store.lookup([key(1)], 5.0))[0]) == MAX_PLACEMENTS_PER_KEY


async def test_a_snapshot_names_lost_nodes_and_leaves_out_what_they_hold(store: Store) -> None:
    term = await elected(store)
    nodes = [NodeRecord(node=NodeId("a"), epoch=5), NodeRecord(node=NodeId("b"), epoch=7, lost_ns=1)]
    placements = [placement(node, epoch, number) for node, epoch in (("a", 5), ("b", 7)) for number in range(2)]
    await term.apply([*(PutNode(node) for node in nodes), *(PutPlacement(each) for each in placements)], 1)
    first = await store.snapshot(None, None, 3, 5.0)
    second = await store.snapshot(first.cursor, first.revision, 3, 5.0)
    assert {*first.placements, *second.placements} == set(placements[:2])
    assert (first.epochs, first.lost) == ({"a": 5, "b": 7}, ("b",))
    assert (second.epochs, second.lost) == ({}, ())
    await term.apply([PutNode(NodeRecord(node=NodeId("b"), epoch=7))], 2)
    again = await store.snapshot(None, None, 9, 5.0)
    assert set(again.placements) == set(placements)
    assert again.lost == ()


async def test_pages_are_of_one_revision_whatever_is_written_meanwhile(store: Store) -> None:
    term = await elected(store)
    await term.apply(plan_event(registered("a", 5, *range(10)), {}), 1)
    pages = [await store.snapshot(None, None, 3, 5.0)]
    await term.apply([DropPlacement(key(number), NODE) for number in range(10)], 2)
    while (last := pages[-1]).cursor is not None:
        pages.append(await store.snapshot(last.cursor, last.revision, 3, 5.0))
    assert [len(page.placements) for page in pages] == [3, 3, 3, 1]
    assert {page.stream_seq for page in pages} == {1}
    assert {page.revision for page in pages} == {pages[0].revision}
    assert {each for page in pages for each in page.placements} == {placement("a", 5, number) for number in range(10)}
    assert (await store.snapshot(None, None, 3, 5.0)).placements == ()


async def test_a_cursor_from_elsewhere_shows_nothing_but_placements(store: Store) -> None:
    term = await elected(store)
    await term.apply(plan_event(registered("a", 5, 1), {}), 1)
    first = await store.snapshot(None, None, 5, 5.0)
    for cursor, expected in ((b"", 1), (b"\0", 1), (b"\xff\xff", 0), (b"/", 1)):
        assert len((await store.snapshot(cursor, first.revision, 5, 5.0)).placements) == expected


async def test_a_revision_that_is_gone_or_never_was_is_told_apart(store: Store) -> None:
    with pytest.raises(RevisionGone):
        await store.snapshot(b"x", 10**12, 5, 5.0)


async def test_one_leads_and_the_next_follows_when_it_resigns(store: Store) -> None:
    term = await elected(store)
    assert await store.leader(5.0) == ME
    assert await store.campaign(OTHER, 30) is None
    await term.resign()
    assert await store.leader(5.0) is None
    assert await store.campaign(OTHER, 30) is not None
    with pytest.raises(Deposed):
        await term.apply([PutNode(NodeRecord(node=NODE, epoch=1))], 1)
    with pytest.raises(Deposed):
        await term.record_members([pool_beat("kv", "a", 1)], (), 5)
    with pytest.raises(Deposed):
        await term.load()
    assert (await store.snapshot(None, None, 5, 5.0)).stream_seq == 0


async def test_a_term_ends_here_before_it_ends_there(store: Store) -> None:
    term = await elected(store, ttl_s=2)
    loop = asyncio.get_running_loop()
    assert term.over_s < loop.time() + 2.0
    holding = asyncio.create_task(term.hold())
    over_s = term.over_s
    while term.over_s == over_s:
        assert not holding.done()
        await asyncio.sleep(0.02)
    await term.resign()
    with pytest.raises(Deposed):
        await asyncio.wait_for(holding, 5.0)


async def test_a_write_that_etcd_carries_out_late_changes_nothing(store: Store, etcd: Etcd, prefix: str) -> None:
    """A transaction is held back on its way, given up, made good by another, and only then let through."""
    term = await elected(store)
    held: list[tuple[object, ...]] = []
    transact = etcd.transact

    async def lose(*arguments: object, timeout_s: float) -> None:
        held.append(arguments)
        raise StoreUnavailable(etcd.endpoints, "lost")

    steps = plan_event(registered("a", 5, 1), {})
    etcd.transact = lose  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        await term.apply(steps, 1)
    etcd.transact = transact  # type: ignore[method-assign]
    await term.apply(steps, 1)
    await term.apply([DropPlacement(key(1), NODE)], 2)
    late = await transact(*held[0], timeout_s=5.0)  # type: ignore[arg-type]
    assert not late.succeeded
    assert await store.lookup([key(1)], 5.0) == ((),)
    assert (await store.snapshot(None, None, 5, 5.0)).stream_seq == 2
    await term.apply([PutPlacement(placement("a", 5, 2))], 3)


async def test_a_write_whose_answer_is_lost_is_noticed_and_not_repeated(store: Store, etcd: Etcd) -> None:
    term = await elected(store)
    transact = etcd.transact

    async def deaf(*arguments: object, timeout_s: float) -> None:
        await transact(*arguments, timeout_s=timeout_s)  # type: ignore[arg-type]
        raise StoreUnavailable(etcd.endpoints, "the answer was lost")

    steps = plan_event(registered("a", 5, 1), {})
    etcd.transact = deaf  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        await term.apply(steps, 1)
    etcd.transact = transact  # type: ignore[method-assign]
    with pytest.raises(OutOfStep):
        await term.apply(steps, 1)
    state = await term.load()
    assert (state.applied_seq, state.nodes) == (1, {NODE: NodeRecord(node=NODE, epoch=5)})
    await term.apply([PutPlacement(placement("a", 5, 2))], 2)
    assert len((await store.snapshot(None, None, 5, 5.0)).placements) == 2


async def test_members_are_listed_until_their_lease_runs_out_or_they_are_gone(store: Store) -> None:
    term = await elected(store)
    beats = [pool_beat(f"kv-{number}", f"n{number}", 1) for number in range(3)]
    await term.record_members(beats, (), 2)

    async def listed() -> list[LiveHeartbeat]:
        return sorted((await store.members(5.0)).members, key=lambda beat: beat.worker)

    assert await listed() == beats
    await term.record_members([beats[1]], [beats[0].worker, beats[1].worker], 30)
    assert await listed() == beats[1:]
    assert len((await term.load()).members) == 2

    async def only_the_renewed_one() -> bool:
        return await listed() == [beats[1]]

    await eventually(only_the_renewed_one)


async def test_a_value_that_cannot_be_read_is_skipped_and_counted(store: Store, etcd: Etcd, prefix: str) -> None:
    term = await elected(store)
    await term.apply(plan_event(registered("a", 5, 1), {}), 1)
    root = prefix.encode()
    damaged = [Put(root + b"/chunks/" + key(1).hex().encode() + b"/z", b"\xc1"), Put(root + b"/nodes/z", b"{")]
    await etcd.transact((), [*damaged, Put(root + b"/members/z", b"")], timeout_s=5.0)
    assert await store.lookup([key(1)], 5.0) == ((placement("a", 5, 1),),)
    assert len((await store.snapshot(None, None, 5, 5.0)).placements) == 1
    assert (await store.members(5.0)).members == ()
    assert store.values.undecodable == 5


async def test_a_deployment_keeps_to_its_prefix(store: Store, etcd: Etcd, prefix: str) -> None:
    outcome = await etcd.transact((), [Range(b"\0", b"\0")], timeout_s=5.0)
    before = {each.key for each in outcome.ranges[0]}
    term = await elected(store)
    await term.apply(plan_event(registered("a", 5, 1), {}), 1)
    await term.record_members([pool_beat("kv", "a", 5)], (), 30)
    outcome = await etcd.transact((), [Range(b"\0", b"\0")], timeout_s=5.0)
    made = {each.key for each in outcome.ranges[0]} - before
    assert {key.removeprefix(prefix.encode()).split(b"/")[1] for key in made} == {
        b"chunks",
        b"nodes",
        b"members",
        b"applied",
        b"leader",
    }
    await etcd.transact((), [Delete(each) for each in made], timeout_s=5.0)


async def test_an_etcd_with_small_transactions_is_refused_and_told_how_to_grow(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, max_txn_ops=128) as server:
        async with Etcd((f"127.0.0.1:{server.port}",)) as etcd:
            with pytest.raises(StoreRefused, match="start etcd with --max-txn-ops 1024, or lower HALFMOON_REGISTRY"):
                await Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=1.0).check(5.0)
            small = Store(etcd, prefix="/x", max_txn_ops=128, write_timeout_s=5.0)
            await small.check(5.0)
            term = await elected(small)
            await term.apply(plan_event(registered("a", 5, *range(500)), {}), 1)
            found = await small.lookup([key(number) for number in range(500)], 5.0)
            assert found == tuple((placement("a", 5, number),) for number in range(500))


async def test_the_next_endpoint_answers_where_one_does_not(etcd_server: EtcdServer, prefix: str) -> None:
    async with Etcd(("127.0.0.1:1", f"127.0.0.1:{etcd_server.port}")) as etcd:
        store = Store(etcd, prefix=prefix, max_txn_ops=1024, write_timeout_s=5.0)
        assert await store.lookup([key(1)], 5.0) == ((),)


async def test_nobody_at_the_address_is_known_in_time() -> None:
    async with Etcd(("127.0.0.1:1",)) as etcd:
        store = Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=1.0)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(StoreUnavailable, match=r"no etcd answers at 127\.0\.0\.1:1 \(.*\): start one or set"):
            await store.check(1.0)
        assert loop.time() - started_s < 5.0


async def test_etcd_survives_readers_who_give_up_half_way(tmp_path: Path) -> None:
    """Versions before 3.5.5 panic when a read is called off while it is carried out: here, at all moments of it."""
    with EtcdServer(tmp_path) as server:
        async with Etcd((f"127.0.0.1:{server.port}",)) as etcd:
            store = Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=5.0)
            term = await elected(store)
            await term.apply(plan_event(registered("a", 5, *range(1000)), {}), 1)
            asked = [key(number) for number in range(1000)]
            num_given_up = 0
            for patience_ms in range(1, 31):
                timed = (store.lookup(asked, patience_ms / 1000) for _ in range(3))
                called_off = asyncio.wait_for(store.lookup(asked, 30.0), patience_ms / 1000)
                results = await asyncio.gather(*timed, called_off, return_exceptions=True)
                num_given_up += sum(isinstance(result, StoreUnavailable | TimeoutError) for result in results)
            assert num_given_up > 0
            found = await store.lookup(asked, 30.0)
            assert found == tuple((placement("a", 5, number),) for number in range(1000))


async def test_user_and_password(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as server:
        address = f"127.0.0.1:{server.port}"
        server.enable_auth("root", "right")
        async with Etcd((address,), user="root", password="wrong") as etcd:
            with pytest.raises(StoreRefused, match="check HALFMOON_REGISTRY_ETCD_USER") as caught:
                await Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=5.0).check(5.0)
            assert "wrong" not in str(caught.value)
        async with Etcd((address,)) as etcd:
            with pytest.raises(StoreRefused, match="check HALFMOON_REGISTRY_ETCD_USER"):
                await Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=5.0).check(5.0)
        async with Etcd((address,), user="root", password="right") as etcd:
            store = Store(etcd, prefix="/x", max_txn_ops=1024, write_timeout_s=5.0)
            await store.check(5.0)
            await elected(store)
            # Simple tokens don't outlive the server: a new one is asked for without anybody noticing.
            server.kill()
            server.start()
            assert await store.lookup([key(1)], 5.0) == ((),)
