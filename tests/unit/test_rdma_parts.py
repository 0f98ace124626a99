"""The parts of rdma that need no device: pairing, proofs, sharing out, and saying why there is none."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.bus.memory import MemoryBroker
from halfmoon.lifecycle.runtime import StartupError
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import NodeInfo
from halfmoon.schemas.rdma import LinkLayer, RdmaGrant, RdmaOffer, RdmaPort, RdmaRange
from halfmoon.transport.choice import Paths
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.absent import AbsentRdma
from halfmoon.transport.rdma.device import open_devices, own_numa_node
from halfmoon.transport.rdma.pairing import PortPair, address_rank, pair_ports, unreachable
from halfmoon.transport.rdma.proofs import is_proven, new_nonce, signed
from halfmoon.transport.rdma.reader import shared_out
from halfmoon.transport.rdma.verbs import RdmaUnavailable, load_verbs
from halfmoon.transport.tcp import TcpTransport
from support.pool_nodes import running_node
from support.rdma_peer import no_device

IPV4 = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
IPV6 = bytes.fromhex("20010db8000000000000000000000001")
LINK_LOCAL = bytes.fromhex("fe80000000000000") + bytes(8)


def roce(device: str, *, speed_mbps: int = 100_000, numa_node: int | None = None, gid: bytes = IPV4) -> RdmaPort:
    return RdmaPort(
        device=device,
        port=1,
        link_layer=LinkLayer.ETHERNET,
        gid=gid,
        gid_index=3,
        speed_mbps=speed_mbps,
        numa_node=numa_node,
    )


def infiniband(device: str, subnet: int = 1) -> RdmaPort:
    gid = subnet.to_bytes(8, "big") + bytes(8)
    return RdmaPort(device=device, port=1, link_layer=LinkLayer.INFINIBAND, gid=gid, gid_index=0)


def names(pairs: list[PortPair], own: list[RdmaPort]) -> list[tuple[str, str]]:
    return [(own[pair.own].device, pair.theirs.device) for pair in pairs]


def test_one_port_each_carries_all_queue_pairs() -> None:
    own = [roce("a")]
    pairs, reason = pair_ports(own, [roce("x")], numa_node=None, num_queue_pairs=3)
    assert (names(pairs, own), reason) == ([("a", "x")] * 3, "")


def test_queue_pairs_are_spread_over_rails() -> None:
    own = [roce(name) for name in ("mlx5_0", "mlx5_1")]
    pairs, _ = pair_ports(own, list(reversed(own)), numa_node=None, num_queue_pairs=4)
    assert names(pairs, own) == [("mlx5_0", "mlx5_0"), ("mlx5_1", "mlx5_1")] * 2


def test_a_port_near_our_memory_wins_over_a_fast_one_and_a_fast_one_over_a_slow_one() -> None:
    own = [
        roce("far", numa_node=1, speed_mbps=400_000),
        roce("near", numa_node=0),
        roce("near-slow", numa_node=0, speed_mbps=10_000),
    ]
    theirs = [roce("x"), roce("slow", speed_mbps=10_000)]
    pairs, _ = pair_ports(own, theirs, numa_node=0, num_queue_pairs=2)
    assert names(pairs, own) == [("near", "x")] * 2
    pairs, _ = pair_ports(own, [roce("y", speed_mbps=400_000)], numa_node=None, num_queue_pairs=1)
    assert names(pairs, own) == [("far", "y")]


def test_a_port_whose_place_is_not_known_is_taken_for_near() -> None:
    own = [roce("far", numa_node=1), roce("somewhere")]
    assert names(pair_ports(own, [roce("x")], numa_node=0, num_queue_pairs=1)[0], own) == [("somewhere", "x")]


@pytest.mark.parametrize(
    ("own", "theirs", "reason"),
    [
        (roce("a"), infiniband("x"), "a is ethernet and x infiniband"),
        (infiniband("a", 1), infiniband("x", 2), "different InfiniBand subnets"),
        (roce("a"), roce("x", gid=IPV6), "type IPv4, x of type IPv6"),
    ],
)
def test_ports_that_do_not_reach_each_other_are_not_paired(own: RdmaPort, theirs: RdmaPort, reason: str) -> None:
    assert reason in str(unreachable(own, theirs))
    pairs, why = pair_ports([own], [theirs], numa_node=None, num_queue_pairs=2)
    assert pairs == []
    assert reason in why


def test_without_ports_there_is_a_reason_too() -> None:
    assert pair_ports([], [roce("x")], numa_node=None, num_queue_pairs=1) == ([], "one of the two nodes has no port")


@given(
    own=st.lists(st.sampled_from([0, 1, None]), min_size=1, max_size=4),
    num_theirs=st.integers(1, 4),
    numa_node=st.sampled_from([0, 1, None]),
    num_queue_pairs=st.integers(1, 16),
)
def test_pairs_are_spread_evenly_over_the_best_ports(
    own: list[int | None], num_theirs: int, numa_node: int | None, num_queue_pairs: int
) -> None:
    ports = [roce(f"own-{index}", numa_node=node) for index, node in enumerate(own)]
    theirs = [roce(f"theirs-{index}") for index in range(num_theirs)]
    pairs, reason = pair_ports(ports, theirs, numa_node=numa_node, num_queue_pairs=num_queue_pairs)
    assert (len(pairs), reason) == (num_queue_pairs, "")
    near = {index for index, node in enumerate(own) if None in (node, numa_node) or node == numa_node}
    uses = {index: sum(pair.own == index for pair in pairs) for index in near or range(len(own))}
    assert sum(uses.values()) == num_queue_pairs
    assert max(uses.values()) - min(uses.values()) <= 1


def test_of_several_addresses_the_routable_ipv4_one_is_used() -> None:
    ranked = [(LINK_LOCAL, False), (LINK_LOCAL, True), (IPV6, True), (IPV4, False), (IPV4, True)]
    assert max(ranked, key=lambda each: address_rank(*each)) == (IPV4, True)
    assert max(ranked[:3], key=lambda each: address_rank(*each)) == (IPV6, True)


GRANT = RdmaGrant(
    connection=bytes(16),
    sequence=1,
    lease_id=LeaseId("lease-1"),
    ranges=(RdmaRange(slot=1, generation=2, end=3, queue_pair=0),),
)


@pytest.mark.parametrize("change", [{"sequence": 2}, {"lease_id": "lease-2"}, {"ranges": ()}, {"connection": b"x"}])
def test_a_proof_covers_every_field(change: Mapping[str, object]) -> None:
    message = signed(b"moon", GRANT)
    assert is_proven(b"moon", message, message.proof)
    assert not is_proven(b"sun", message, message.proof)
    assert not is_proven(b"moon", msgspec.structs.replace(message, **change), message.proof)
    assert not is_proven(b"moon", GRANT, b"")


def test_nonces_are_new() -> None:
    assert len({new_nonce() for _ in range(100)}) == 100


@given(num_shares=st.integers(1, 16), sizes=st.lists(st.integers(0, 1 << 24), max_size=100))
def test_shares_are_about_equal(num_shares: int, sizes: list[int]) -> None:
    shares = shared_out(num_shares, sizes)
    totals = [
        sum(size for size, share in zip(sizes, shares, strict=True) if share == each) for each in range(num_shares)
    ]
    assert len(shares) == len(sizes)
    assert max(totals) - min(totals) <= max(sizes, default=0)


def test_the_numa_node_is_known_where_all_our_processors_are_on_one(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    others = f"{max(allowed) + 1}-{max(allowed) + 4}"
    for node, cpus in (("node0", others), ("node1", ",".join(map(str, allowed))), ("node2", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{cpus}\n")
    assert own_numa_node(tmp_path) == 1
    (tmp_path / "node0" / "cpulist").write_text(f"{allowed[0]},{others}\n")
    assert own_numa_node(tmp_path) is None


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)


def test_without_pyverbs_the_reason_says_what_to_install(no_pyverbs: None, tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match=r"pyverbs can't be imported .* apt-get install python3-pyverbs"):
        load_verbs([tmp_path])


def test_a_broken_pyverbs_is_unavailable_and_not_left_half_imported(no_pyverbs: None, tmp_path: Path) -> None:
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs" / "__init__.py").write_text("raise ImportError('libibverbs.so.1 is missing')")
    with pytest.raises(RdmaUnavailable, match=r"libibverbs\.so\.1 is missing"):
        load_verbs([tmp_path])
    assert "pyverbs" not in sys.modules


def node(rdma: RdmaOffer | None = None) -> NodeInfo:
    return NodeInfo(
        node=NodeId("node-a"),
        epoch=1,
        host="elsewhere",
        arena_path="/nowhere",
        slot_bytes=4096,
        num_slots=1,
        tcp_address="127.0.0.1:1",
        rdma=rdma,
    )


async def test_where_it_is_absent_the_next_transport_is_used_and_the_reason_told() -> None:
    absent, tcp = AbsentRdma("this machine has no RDMA device"), TcpTransport("moon")
    choice = Paths([absent, tcp]).choose(node(RdmaOffer(ports=(roce("x"),))))
    assert [each.name for each in choice.usable] == ["tcp"]
    assert choice.reasons == {"rdma": "this machine has no RDMA device"}
    read = SliceRead(0, 1, 0, memoryview(bytearray(8)))
    results = await absent.read(node(), LeaseId("lease-1"), [read], deadline_ns=2**62)
    assert [(each.outcome, each.detail) for each in results] == [
        (ReadOutcome.UNREACHABLE, "this machine has no RDMA device")
    ]
    await absent.close()
    await tcp.close()


needs_no_device = pytest.mark.skipif(no_device() is None, reason="this machine has an RDMA device")


@needs_no_device
def test_a_device_that_is_named_and_not_there_is_missed() -> None:
    try:
        verbs = load_verbs()
    except RdmaUnavailable as error:
        pytest.skip(str(error))
    with pytest.raises(RdmaUnavailable, match="there is no RDMA device mlx5_7; there is none"):
        open_devices(verbs, ("mlx5_7",), None)


@needs_no_device
async def test_a_node_without_a_device_offers_none_and_serves(tmp_path: Path) -> None:
    async with running_node(MemoryBroker(), tmp_path, "node-a") as made:
        assert made.client.info.rdma is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param({}, "RDMA device|pyverbs", marks=needs_no_device),
        ({"cluster_secret": None}, "needs a cluster_secret"),
    ],
)
async def test_a_node_that_insists_on_rdma_does_not_start_without(
    tmp_path: Path, settings: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(StartupError, match=f"rdma is `on`, and can't be used: .*({reason})"):
        async with running_node(MemoryBroker(), tmp_path, "node-a", settings={"rdma": "on", **settings}):
            pass
    assert list(tmp_path.iterdir()) == []
