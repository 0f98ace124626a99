"""What the values in etcd hold, as MessagePack, and how they are read."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from halfmoon.registry.etcd import KeyValue
from halfmoon.registry.members import LiveHeartbeat
from halfmoon.registry.orders import OrderBook
from halfmoon.registry.policy import NodeRecord
from halfmoon.schemas.chunks import ChunkPlacement
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.members import NodeHeartbeat, ServiceHeartbeat, WorkerHeartbeat
from halfmoon.schemas.orders import FlushOrder, PinOrder

V = TypeVar("V")


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """How far the stream has been applied, and by which write. No two writes leave the same stamp."""

    seq: int
    nonce: bytes


class Values:
    """Reads values. One that can't be read (damaged, or of a later version) is skipped and counted."""

    def __init__(self) -> None:
        self.undecodable = 0
        self._placement: msgspec.msgpack.Decoder[ChunkPlacement] = msgspec.msgpack.Decoder(ChunkPlacement)
        self._node: msgspec.msgpack.Decoder[NodeRecord] = msgspec.msgpack.Decoder(NodeRecord)
        self._flush: msgspec.msgpack.Decoder[FlushOrder] = msgspec.msgpack.Decoder(FlushOrder)
        self._pin: msgspec.msgpack.Decoder[PinOrder] = msgspec.msgpack.Decoder(PinOrder)
        self._heartbeat: msgspec.msgpack.Decoder[LiveHeartbeat] = msgspec.msgpack.Decoder(
            WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat
        )

    def placements(self, found: Iterable[KeyValue]) -> list[ChunkPlacement]:
        return [value for each in found if (value := self._read(self._placement, each)) is not None]

    def nodes(self, found: Iterable[KeyValue]) -> dict[NodeId, NodeRecord]:
        records = (self._read(self._node, each) for each in found)
        return {record.node: record for record in records if record is not None}

    def heartbeats(self, found: Iterable[KeyValue]) -> list[LiveHeartbeat]:
        return [value for each in found if (value := self._read(self._heartbeat, each)) is not None]

    def orders(self, last: Sequence[KeyValue], flushes: Iterable[KeyValue], pins: Iterable[KeyValue]) -> OrderBook:
        """All that stands. Raises msgspec.MsgspecError where the last number can't be read."""
        orders = (self._read(self._flush, each) for each in flushes)
        kept = (self._read(self._pin, each) for each in pins)
        return OrderBook(
            seq=msgspec.msgpack.decode(last[0].value, type=int) if last else 0,
            flushes={order.seq: order for order in orders if order is not None},
            pins={pin.key: pin for pin in kept if pin is not None},
        )

    def _read(self, decoder: msgspec.msgpack.Decoder[V], found: KeyValue) -> V | None:
        try:
            return decoder.decode(found.value)
        except msgspec.MsgspecError:
            self.undecodable += 1
            return None


def read_stamp(found: Sequence[KeyValue]) -> Stamp:
    """The stamp; sequence 0 where none was written yet."""
    return msgspec.msgpack.decode(found[0].value, type=Stamp) if found else Stamp(0, b"")
