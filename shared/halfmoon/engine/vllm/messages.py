"""What the engine and its connector say to each other, over a Unix socket: frames of u32 length and MessagePack.

    engine ── Load, Sinks, Filled, Drop ──▶ each rank's connector
    engine ◀── Ready, Bound, Loaded, Written, Dropped ── each rank's connector

A sequence has a number of its own here: vLLM changes request ids on the way.
"""

import struct
from typing import Final

import msgspec

MAX_FRAME_BYTES: Final = 16 << 20
LENGTH: Final = struct.Struct(">I")


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class PlaceOf(msgspec.Struct, frozen=True, array_like=True):
    """A payload's bytes: `[offset, offset + num_bytes)` of a file that can be mapped."""

    path: str
    offset: int
    num_bytes: int


class Load(_Message, frozen=True):
    """Copy this payload into the blocks of chunk `index`, but for those that are hot."""

    seq: int
    load: int
    """Number of the order, for its report."""
    index: int
    num_tokens: int
    place: PlaceOf


class SinkPlace(msgspec.Struct, frozen=True, array_like=True):
    index: int
    num_tokens: int
    place: PlaceOf


class Sinks(_Message, frozen=True):
    """Copy these chunks out as soon as they are computed."""

    seq: int
    sinks: tuple[SinkPlace, ...]


class Filled(_Message, frozen=True):
    """No more loads come: positions `[0, num_tokens)` are there, vLLM is to compute the rest."""

    seq: int
    num_tokens: int


class Drop(_Message, frozen=True):
    """Touch nothing of this sequence any more."""

    seq: int


Order = Load | Sinks | Filled | Drop


class Ready(_Message, frozen=True):
    """The KV is allocated. The first report of each rank."""

    rank: int
    layout: str
    """How this rank lays out a block, as far as it decides whether two engines can share them."""
    block_bytes: int
    """Of this rank, over all layers."""
    num_blocks: int
    kv_dtype: str


class Bound(_Message, frozen=True):
    """vLLM has given the sequence its blocks; `[0, num_hot)` came from its prefix cache."""

    seq: int
    num_hot: int


class Loaded(_Message, frozen=True):
    seq: int
    load: int
    error: str = ""


class Written(_Message, frozen=True):
    """A sink holds its chunk (this rank's share of it)."""

    seq: int
    index: int
    started_ns: int
    finished_ns: int
    is_hot: bool
    error: str = ""


class Dropped(_Message, frozen=True):
    """Nothing of the sequence is touched any more by this rank."""

    seq: int


Report = Ready | Bound | Loaded | Written | Dropped

ORDERS: Final = msgspec.msgpack.Decoder(Order)
REPORTS: Final = msgspec.msgpack.Decoder(Report)


def frame(message: Order | Report) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload
