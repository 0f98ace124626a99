"""`tcp`, on the wire: the mutual handshake, requests, and how an answer is laid out.

    server ── Hello {nonce, node, epoch} ──▶ client       a frame: u32 big-endian length, then MessagePack
    client ── Auth {nonce, proof} ──▶ server              proof = HMAC-SHA256(secret, who ‖ both nonces ‖ node ‖ epoch)
    server ── Welcome {proof} | Refused {message} ──▶ client
    client ── ReadRequest {lease, slices} ──▶ server      again and again
    server ── the answer, in groups of slices that both ends form alike (`groups`) ──▶ client

    | status of each slice of group 1 | bytes of those that are `ok`, in order | status of these, looked at again |
    | status of each slice of group 2 | … | … |
    | Reasons {…} where any status wasn't `ok`: a frame |

A status is one byte. The second one of a slice says how its lease stood after its bytes had been copied out of the
arena: they are good only if it is `ok` too. So a group costs its server one look before and one after, one `sendmsg`,
and its reader one `recvmsg`, however many slices it has.

The proofs show that both ends know the secret; the bytes themselves are not encrypted.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.wire import Message
from halfmoon.transport.tcp_stream import Deadline, WireError, receive_exactly, send_all

MAX_FRAME_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 4096
MAX_SLICES = 4096
MAX_REASON_BYTES = 200
"""So that the reasons of a whole request fit a frame."""
NONCE_BYTES = 32
_GROUP_BYTES = 32 << 20
"""About 10 ms at loopback speed: long enough to make system calls cheap, short enough for times and checks to mean
something."""
_GROUP_SLICES = 512
"""Half of what one `sendmsg` or `recvmsg` takes on Linux (IOV_MAX, 1024)."""
_LENGTH = struct.Struct(">I")


class Status(IntEnum):
    OK = 0
    STALE = 1
    REFUSED = 2


class HandshakeRefused(WireError):
    """One of the two ends doesn't trust the other."""


class Hello(Message, frozen=True, tag="tcp.hello.v1"):
    node: str
    epoch: int
    nonce: bytes
    secret: bool
    """Whether the server has a secret, and so expects one."""


class Auth(Message, frozen=True, tag="tcp.auth.v1"):
    nonce: bytes
    proof: bytes = b""


class Welcome(Message, frozen=True, tag="tcp.welcome.v1"):
    proof: bytes = b""


class Refused(Message, frozen=True, tag="tcp.refused.v1"):
    message: str


class WireSlice(Message, frozen=True):
    slot: int
    generation: int
    offset: int
    num_bytes: int


class ReadRequest(Message, frozen=True, tag="tcp.read.v2"):
    lease_id: LeaseId
    slices: tuple[WireSlice, ...]


class Reasons(Message, frozen=True, tag="tcp.reasons.v1"):
    reasons: tuple[str, ...]
    """Of the slices that weren't `ok`, in the order of the request."""


M = TypeVar("M")

HELLO: Final[Decoder[Hello]] = Decoder(Hello)
AUTH: Final[Decoder[Auth]] = Decoder(Auth)
WELCOME: Final[Decoder[Welcome | Refused]] = Decoder(Welcome | Refused)
READ_REQUEST: Final[Decoder[ReadRequest]] = Decoder(ReadRequest)
REASONS: Final[Decoder[Reasons]] = Decoder(Reasons)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, who: str, hello: Hello, client_nonce: bytes) -> bytes:
    """What only a holder of the secret can say about this handshake, as `who`: `client` or `server`."""
    facts = msgspec.msgpack.encode((who, hello.nonce, client_nonce, hello.node, hello.epoch))
    return hmac.digest(secret, facts, "sha256")


def proven(secret: bytes, who: str, hello: Hello, client_nonce: bytes, claim: bytes) -> bool:
    return hmac.compare_digest(proof(secret, who, hello, client_nonce), claim)


def groups(sizes: Sequence[int]) -> Iterator[range]:
    """Cut a request into groups: positions of slices that follow each other. `sizes` in bytes; one may be any integer.

    A group is full when it has 32 MiB or 512 slices; a slice that is larger makes a group by itself.
    """
    start = num_bytes = 0
    for position, size in enumerate(sizes):
        size = max(size, 0)
        if position > start and (num_bytes + size > _GROUP_BYTES or position - start == _GROUP_SLICES):
            yield range(start, position)
            start, num_bytes = position, 0
        num_bytes += size
    if start < len(sizes):
        yield range(start, len(sizes))


def statuses(codes: bytes) -> list[Status]:
    """Raises `WireError` for a byte that is no status."""
    try:
        return [Status(code) for code in codes]
    except ValueError as error:
        raise WireError(f"an unknown status: {error}") from None


def frame(message: Message) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def send_message(connection: socket.socket, message: Message, deadline: Deadline) -> None:
    send_all(connection, [memoryview(frame(message))], deadline)


def receive_message(
    connection: socket.socket, decoder: Decoder[M], deadline: Deadline, max_bytes: int = MAX_HANDSHAKE_BYTES
) -> M:
    """One frame. Raises `WireError` for one that is too long, before its memory is taken, or isn't what is expected."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes, where {max_bytes} is the most: not a halfmoon peer?")
    try:
        return decoder.decode(receive_exactly(connection, length, deadline))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"an unexpected message: {error}") from None
