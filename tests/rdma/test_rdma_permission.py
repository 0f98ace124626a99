"""Who may read what: peers that know the secret, and slots that their leases cover. Also against those who cheat."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.errors import RemoteError
from halfmoon.schemas.ids import LeaseId, NodeId
from halfmoon.schemas.kv_tier import Done
from halfmoon.schemas.rdma import (
    QueuePairEnd,
    RdmaAccess,
    RdmaConnect,
    RdmaConnected,
    RdmaDisconnect,
    RdmaGrant,
    RdmaGranted,
    RdmaHello,
    RdmaRange,
    RdmaVerdict,
    WantedQueuePair,
)
from halfmoon.schemas.wire import ErrorCode
from halfmoon.transport.protocol import ReadOutcome, SliceRead
from halfmoon.transport.rdma.device import Region
from halfmoon.transport.rdma.node import RdmaNode
from halfmoon.transport.rdma.proofs import new_nonce, signed
from halfmoon.transport.rdma.queue_pair import QueuePair, Status
from halfmoon.transport.rdma.reader import RdmaTransport
from halfmoon.transport.rdma.server import MAX_RANGES, RdmaServer
from support.rdma_peer import (
    GENERATION,
    GOOD_LEASE,
    NODE,
    NUM_SLOTS,
    SECRET,
    SLOT_BYTES,
    DirectControl,
    RdmaPeer,
    payload,
)
from support.wait import until, until_blocking

PROVEN = SECRET.encode()
ARENA_BYTES = SLOT_BYTES * NUM_SLOTS


@dataclass
class Intruder:
    """A reader that does what it likes with what it was given. One queue pair; its memory is one slot's size."""

    server: RdmaServer
    end: QueuePair
    memory: bytearray
    region: Region
    connected: RdmaConnected
    sequence: int = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def connected_to(cls, peer: RdmaPeer, devices: RdmaNode) -> AsyncIterator["Intruder"]:
        device = devices.nics[0].device
        end = QueuePair(device, max_posted=8)
        memory = bytearray(SLOT_BYTES)
        region = device.register(memoryview(memory))
        try:
            connected = await peer.server.connect(await asking(peer, end.end))
            end.connect(connected.queue_pairs[0], is_readable=False)
            yield cls(peer.server, end, memory, region, connected)
        finally:
            end.close()
            region.close()

    async def opened(self, slot: int, lease: LeaseId = GOOD_LEASE, end: int = SLOT_BYTES) -> RdmaAccess:
        self.sequence += 1
        wanted = RdmaRange(slot=slot, generation=GENERATION, end=end, queue_pair=0)
        grant = RdmaGrant(
            connection=self.connected.connection, sequence=self.sequence, lease_id=lease, ranges=(wanted,)
        )
        return (await self.server.grant(signed(PROVEN, grant))).access[0]

    def read(self, offset: int, num_bytes: int, key: int) -> Status:
        """Bytes of the arena, `offset` from its start, into our memory."""
        address = self.connected.arena_address + offset
        self.end.post_read(1, self.region.address, self.region.local_key, num_bytes, address, key)
        done: list[Status] = []

        def is_done() -> bool:
            done.extend(each.status for each in self.end.poll())
            return bool(done)

        until_blocking(is_done, what="a completion")
        return done[0]


async def asking(peer: RdmaPeer, end: QueuePairEnd, **changes: object) -> RdmaConnect:
    port = peer.devices.offer.ports[0]
    request = RdmaConnect(
        reader="intruder",
        node=NODE,
        epoch=peer.info.epoch,
        server_nonce=(await peer.server.hello(RdmaHello(reader="intruder"))).nonce,
        reader_nonce=new_nonce(),
        queue_pairs=(WantedQueuePair(end=end, device=port.device, port=port.port),),
    )
    return signed(PROVEN, msgspec.structs.replace(request, **changes))


def has_bounds(peer: RdmaPeer) -> bool:
    """Soft-RoCE looks at whose a window is, and whether it is open still, but not at where it ends."""
    return peer.devices.windows and not any(port.device.startswith("rxe") for port in peer.devices.offer.ports)


@pytest.fixture
async def intruder(peer: RdmaPeer, devices: RdmaNode) -> AsyncIterator[Intruder]:
    async with Intruder.connected_to(peer, devices) as made:
        yield made


@contextlib.contextmanager
def refused(code: ErrorCode, reason: str) -> Iterator[None]:
    with pytest.raises(RemoteError, match=reason) as caught:
        yield
    assert caught.value.error.code is code


async def test_a_granted_slot_can_be_read_with_its_key(intruder: Intruder) -> None:
    access = await intruder.opened(3)
    assert intruder.read(3 * SLOT_BYTES, SLOT_BYTES, access.key) is Status.OK
    assert intruder.memory == payload(3)


async def test_a_wrong_key_opens_nothing(intruder: Intruder) -> None:
    access = await intruder.opened(3)
    assert intruder.read(3 * SLOT_BYTES, 64, access.key ^ 0x5A00) is Status.NO_ACCESS
    assert intruder.memory == bytes(SLOT_BYTES)


@pytest.mark.parametrize("offset", [-4096, 10 * ARENA_BYTES])
async def test_nothing_outside_the_arena_can_be_read(intruder: Intruder, offset: int) -> None:
    access = await intruder.opened(3)
    assert intruder.read(offset, 64, access.key) is Status.NO_ACCESS


async def test_what_was_not_granted_is_closed_where_windows_have_bounds(peer: RdmaPeer, intruder: Intruder) -> None:
    access = await intruder.opened(3, end=1000)
    expected = Status.NO_ACCESS if has_bounds(peer) else Status.OK
    assert intruder.read(3 * SLOT_BYTES, 1000, access.key) is Status.OK
    assert intruder.read(3 * SLOT_BYTES + 990, 11, access.key) is expected


async def test_the_key_to_the_generations_opens_no_slot_where_windows_have_bounds(
    peer: RdmaPeer, intruder: Intruder
) -> None:
    key = intruder.connected.table_keys[0]
    assert intruder.read(ARENA_BYTES, 8 * NUM_SLOTS, key) is Status.OK
    assert intruder.memory[: 8 * NUM_SLOTS] == GENERATION.to_bytes(8, "little") * NUM_SLOTS
    expected = Status.NO_ACCESS if has_bounds(peer) else Status.OK
    assert intruder.read(0, 64, key) is expected


async def test_a_window_is_for_one_reader_alone(devices: RdmaNode, tmp_path: Path) -> None:
    async with (
        RdmaPeer(tmp_path).serving() as peer,
        Intruder.connected_to(peer, devices) as one,
        Intruder.connected_to(peer, devices) as other,
    ):
        access = await one.opened(3)
        assert other.read(3 * SLOT_BYTES, 64, access.key) is Status.NO_ACCESS
        assert one.read(3 * SLOT_BYTES, 64, access.key) is Status.OK


async def test_when_the_lease_ends_the_slot_is_closed_where_there_are_windows(
    peer: RdmaPeer, intruder: Intruder
) -> None:
    access = await intruder.opened(3)
    assert intruder.read(3 * SLOT_BYTES, 64, access.key) is Status.OK
    assert peer.server.num_open_slots == 1
    peer.leases.clear()
    await until(lambda: peer.server.num_open_slots == 0, what="the slot is closed")
    expected = Status.NO_ACCESS if peer.devices.windows else Status.OK
    assert intruder.read(3 * SLOT_BYTES, 64, access.key) is expected


async def test_the_next_grant_closes_what_the_last_one_opened(peer: RdmaPeer, intruder: Intruder) -> None:
    first = await intruder.opened(3)
    second = await intruder.opened(4)
    assert peer.server.num_open_slots == 1
    assert intruder.read(4 * SLOT_BYTES, 64, second.key) is Status.OK
    expected = Status.NO_ACCESS if peer.devices.windows else Status.OK
    assert intruder.read(3 * SLOT_BYTES, 64, first.key) is expected


async def test_what_is_disconnected_reads_nothing(intruder: Intruder) -> None:
    access = await intruder.opened(3)
    goodbye = signed(PROVEN, RdmaDisconnect(connection=intruder.connected.connection))
    assert await intruder.server.disconnect(goodbye) == Done()
    assert intruder.server.num_connections == 0
    assert intruder.read(3 * SLOT_BYTES, 64, access.key) is Status.NO_ANSWER
    with refused(ErrorCode.STALE, "connect again"):
        await intruder.opened(3)


@pytest.mark.parametrize(
    ("wanted", "verdict", "detail"),
    [
        (RdmaRange(slot=NUM_SLOTS, generation=GENERATION, end=1, queue_pair=0), "refused", "no such place"),
        (RdmaRange(slot=-1, generation=GENERATION, end=1, queue_pair=0), "refused", "no such place"),
        (RdmaRange(slot=0, generation=GENERATION, end=SLOT_BYTES + 1, queue_pair=0), "refused", "no such place"),
        (RdmaRange(slot=0, generation=GENERATION, end=-1, queue_pair=0), "refused", "no such place"),
        (RdmaRange(slot=0, generation=GENERATION, end=1, queue_pair=1), "refused", "of a connection of 1"),
        (RdmaRange(slot=0, generation=GENERATION, end=1, queue_pair=-1), "refused", "of a connection of 1"),
        (RdmaRange(slot=0, generation=GENERATION - 1, end=1, queue_pair=0), "stale", "another generation"),
    ],
)
async def test_ranges_are_checked_before_anything_is_opened(
    intruder: Intruder, wanted: RdmaRange, verdict: str, detail: str
) -> None:
    good = RdmaRange(slot=1, generation=GENERATION, end=1, queue_pair=0)
    grant = RdmaGrant(connection=intruder.connected.connection, sequence=1, lease_id=GOOD_LEASE, ranges=(wanted, good))
    granted = await intruder.server.grant(signed(PROVEN, grant))
    assert [each.verdict for each in granted.access] == [verdict, RdmaVerdict.OPEN]
    assert granted.access[0].key == 0
    assert detail in granted.access[0].detail
    assert intruder.server.num_open_slots == 1


async def test_grants_are_bounded_and_never_repeated(intruder: Intruder) -> None:
    one = RdmaRange(slot=1, generation=GENERATION, end=1, queue_pair=0)
    grant = RdmaGrant(
        connection=intruder.connected.connection, sequence=1, lease_id=GOOD_LEASE, ranges=(one,) * (MAX_RANGES + 1)
    )
    with refused(ErrorCode.INVALID_REQUEST, "257 ranges"):
        await intruder.server.grant(signed(PROVEN, grant))
    grant = msgspec.structs.replace(grant, ranges=(one,) * MAX_RANGES)
    assert len((await intruder.server.grant(signed(PROVEN, grant))).access) == MAX_RANGES
    with refused(ErrorCode.INVALID_REQUEST, "grant 1 after 1"):
        await intruder.server.grant(signed(PROVEN, grant))


async def test_a_connection_needs_the_secret_the_epoch_and_a_fresh_nonce(peer: RdmaPeer, devices: RdmaNode) -> None:
    end = QueuePair(devices.nics[0].device, max_posted=8)
    good = await asking(peer, end.end)
    with refused(ErrorCode.INVALID_REQUEST, "cluster_secret doesn't match"):
        await peer.server.connect(signed(b"sun", await asking(peer, end.end)))
    with refused(ErrorCode.INVALID_REQUEST, "cluster_secret doesn't match"):
        await peer.server.connect(msgspec.structs.replace(await asking(peer, end.end), reader="somebody else"))
    with refused(ErrorCode.STALE, "epoch 1 answers where peer in 2 was wanted"):
        await peer.server.connect(await asking(peer, end.end, epoch=2))
    with refused(ErrorCode.INVALID_REQUEST, "nonce"):
        await peer.server.connect(await asking(peer, end.end, server_nonce=new_nonce()))
    with refused(ErrorCode.INVALID_REQUEST, "nonce"):
        await peer.server.connect(await asking(peer, end.end, reader_nonce=b"short"))
    assert peer.server.num_connections == 0
    await peer.server.connect(good)
    with refused(ErrorCode.INVALID_REQUEST, "nonce"):
        await peer.server.connect(good)
    assert peer.server.num_connections == 1
    end.close()


async def test_ends_that_can_not_be_are_refused(peer: RdmaPeer, devices: RdmaNode) -> None:
    pair = QueuePair(devices.nics[0].device, max_posted=8)
    end, port = pair.end, pair.end.port
    replace = msgspec.structs.replace
    for wrong in (
        replace(end, number=1 << 24),
        replace(end, first_sequence=-1),
        replace(end, port=replace(port, mtu_bytes=77)),
        replace(end, port=replace(port, gid=b"abc")),
        replace(end, port=replace(port, lid=1 << 16)),
        replace(end, port=replace(port, max_reads=0)),
        replace(end, port=replace(port, max_message_bytes=-5)),
    ):
        with refused(ErrorCode.UNAVAILABLE, "can't be"):
            await peer.server.connect(await asking(peer, wrong))
    one = WantedQueuePair(end=end, device=port.device, port=port.port)
    with refused(ErrorCode.INVALID_REQUEST, "no device nic9:1"):
        await peer.server.connect(await asking(peer, end, queue_pairs=(replace(one, device="nic9"),)))
    for num in (0, 17):
        with refused(ErrorCode.INVALID_REQUEST, "1 to 16"):
            await peer.server.connect(await asking(peer, end, queue_pairs=(one,) * num))
    assert peer.server.num_connections == 0
    pair.close()


async def test_ends_that_do_not_share_a_secret_say_so(peer: RdmaPeer, devices: RdmaNode) -> None:
    transport = RdmaTransport(devices, DirectControl({NODE: peer.server}), reader="reader", secret="sun")
    outcome, detail, buffer = await reading(transport, peer)
    assert outcome is ReadOutcome.UNREACHABLE
    assert "the cluster_secret doesn't match" in detail
    assert buffer == bytes(SLOT_BYTES)
    await transport.close()


class Impostor(DirectControl):
    """Answers in a peer's name, without its secret."""

    def __init__(self, server: RdmaServer, lies: set[str]) -> None:
        super().__init__({NODE: server})
        self._lies = lies

    async def connect(self, node: NodeId, request: RdmaConnect, timeout_s: float) -> RdmaConnected:
        answer = await super().connect(node, request, timeout_s)
        return msgspec.structs.replace(answer, arena_address=0) if "address" in self._lies else answer

    async def grant(self, node: NodeId, request: RdmaGrant, timeout_s: float) -> RdmaGranted:
        answer = await super().grant(node, request, timeout_s)
        return msgspec.structs.replace(answer, access=answer.access[:1] * 2) if "access" in self._lies else answer


@pytest.mark.parametrize("lie", ["address", "access"])
async def test_an_answer_that_is_not_the_peers_is_not_believed(peer: RdmaPeer, devices: RdmaNode, lie: str) -> None:
    transport = RdmaTransport(devices, Impostor(peer.server, {lie}), reader="reader", secret=SECRET)
    outcome, detail, buffer = await reading(transport, peer)
    assert outcome is ReadOutcome.UNREACHABLE
    assert "prove" in detail or "isn't one to the question" in detail
    assert buffer == bytes(SLOT_BYTES)
    await transport.close()


async def test_readers_that_are_gone_are_dropped_and_those_that_come_back_connect_again(
    devices: RdmaNode, tmp_path: Path
) -> None:
    async with RdmaPeer(tmp_path, idle_s=0.3, max_connections=1).serving() as peer:
        control = DirectControl({NODE: peer.server})
        one = RdmaTransport(devices, control, reader="one", secret=SECRET)
        assert await reading(one, peer) == (ReadOutcome.OK, "", payload(0))
        assert peer.server.num_connections == 1
        await until(lambda: peer.server.num_connections == 0, what="the silent reader is dropped")
        assert await reading(one, peer) == (ReadOutcome.OK, "", payload(0))
        other = RdmaTransport(devices, control, reader="other", secret=SECRET)
        for _ in range(2):  # Each takes the other's place.
            assert await reading(other, peer) == (ReadOutcome.OK, "", payload(0))
            assert await reading(one, peer) == (ReadOutcome.OK, "", payload(0))
            assert peer.server.num_connections == 1
        await one.close()
        await other.close()


async def reading(transport: RdmaTransport, peer: RdmaPeer) -> tuple[ReadOutcome, str, bytes]:
    buffer = bytearray(SLOT_BYTES)
    read = SliceRead(0, GENERATION, 0, memoryview(buffer))
    deadline_ns = time.time_ns() + 20_000_000_000
    (result,) = await transport.read(peer.info, GOOD_LEASE, [read], deadline_ns=deadline_ns)
    return result.outcome, result.detail, bytes(buffer)
