"""`tcp`, on the wire: frames, the mutual handshake, and the headers of slices. Blocking sockets; used from threads.

    server ── Hello {nonce, node, epoch} ──▶ client       a frame: u32 big-endian length, then MessagePack
    client ── Auth {nonce, proof} ──▶ server              proof = HMAC-SHA256(secret, who ‖ both nonces ‖ node ‖ epoch)
    server ── Welcome {proof} | Refused {message} ──▶ client
    client ── ReadRequest {lease, slices} ──▶ server      again and again
    server ── for each slice, in order: status byte;      not `ok`: u16 length and a UTF-8 reason
              `ok`: the bytes, then a second status byte, as the lease stood after they had been sent

The proofs show that both ends know the secret; the bytes themselves are not encrypted.
"""

import hmac
import secrets
import socket
import struct
import time
from enum import IntEnum
from typing import Final, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from halfmoon.schemas.ids import LeaseId
from halfmoon.schemas.wire import Message

MAX_FRAME_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 4096
MAX_SLICES = 4096
NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
_REASON = struct.Struct(">H")


class Status(IntEnum):
    OK = 0
    STALE = 1
    REFUSED = 2


class WireError(Exception):
    """The peer broke the protocol, refused, or went away. The message says which."""


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


class ReadRequest(Message, frozen=True, tag="tcp.read.v1"):
    lease_id: LeaseId
    slices: tuple[WireSlice, ...]


M = TypeVar("M")

HELLO: Final[Decoder[Hello]] = Decoder(Hello)
AUTH: Final[Decoder[Auth]] = Decoder(Auth)
WELCOME: Final[Decoder[Welcome | Refused]] = Decoder(Welcome | Refused)
READ_REQUEST: Final[Decoder[ReadRequest]] = Decoder(ReadRequest)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, who: str, hello: Hello, client_nonce: bytes) -> bytes:
    """What only a holder of the secret can say about this handshake, as `who`: `client` or `server`."""
    facts = msgspec.msgpack.encode((who, hello.nonce, client_nonce, hello.node, hello.epoch))
    return hmac.digest(secret, facts, "sha256")


def proven(secret: bytes, who: str, hello: Hello, client_nonce: bytes, claim: bytes) -> bool:
    return hmac.compare_digest(proof(secret, who, hello, client_nonce), claim)


class Deadline:
    """A point in monotonic time that bounds every socket operation; another thread may bring it forward to now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._ended = False

    def end_now(self) -> None:
        self._ended = True

    def apply(self, connection: socket.socket) -> None:
        """Bound the next operation. Raises TimeoutError where no time is left."""
        connection.settimeout(self.left())

    def left(self) -> float:
        """Seconds, above zero. Raises TimeoutError where none are left."""
        left = self._at - time.monotonic()
        if self._ended or left <= 0:
            raise TimeoutError("no time left")
        return left


def send_message(connection: socket.socket, message: Message, deadline: Deadline) -> None:
    payload = msgspec.msgpack.encode(message)
    deadline.apply(connection)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_message(
    connection: socket.socket, decoder: Decoder[M], deadline: Deadline, max_bytes: int = MAX_HANDSHAKE_BYTES
) -> M:
    """One frame. Raises `WireError` for one that is too long, before its memory is taken, or isn't what is expected."""
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes, where {max_bytes} is the most: not a halfmoon peer?")
    try:
        return decoder.decode(receive_exactly(connection, length, deadline))
    except msgspec.MsgspecError as error:
        raise WireError(f"an unexpected message: {error}") from None


def receive_exactly(connection: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(connection, memoryview(buffer), deadline)
    return bytes(buffer)


def receive_into(connection: socket.socket, destination: memoryview, deadline: Deadline) -> None:
    """Fill `destination`. Raises `WireError` where the peer ends early, OSError and TimeoutError."""
    received = 0
    while received < len(destination):
        deadline.apply(connection)
        count = connection.recv_into(destination[received:])
        if count == 0:
            raise WireError("the peer closed the connection")
        received += count


def send_slice(connection: socket.socket, payload: memoryview, deadline: Deadline) -> None:
    """The `ok` status and the bytes, straight from where they lie."""
    parts = [memoryview(bytes([Status.OK])), payload]
    while parts:
        deadline.apply(connection)
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]


def send_status(connection: socket.socket, status: Status, reason: str, deadline: Deadline) -> None:
    """A status without bytes behind it; a reason follows where it isn't `ok`."""
    frame = bytes([status])
    if status is not Status.OK:
        text = reason.encode()[:1000]
        frame += _REASON.pack(len(text)) + text
    deadline.apply(connection)
    connection.sendall(frame)


def receive_status(connection: socket.socket, deadline: Deadline) -> tuple[Status, str]:
    """A status, and the reason where it isn't `ok`."""
    code = receive_exactly(connection, 1, deadline)[0]
    try:
        status = Status(code)
    except ValueError:
        raise WireError(f"an unknown status {code}") from None
    if status is Status.OK:
        return status, ""
    (length,) = _REASON.unpack(receive_exactly(connection, _REASON.size, deadline))
    return status, receive_exactly(connection, length, deadline).decode(errors="replace")
