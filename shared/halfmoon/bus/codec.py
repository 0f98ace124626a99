"""Structs to bytes and back: MessagePack, or JSON where a person or a JSON client speaks."""

from collections.abc import Mapping
from types import UnionType
from typing import Generic, TypeVar, overload

import msgspec

from halfmoon.bus.errors import Undecodable
from halfmoon.schemas.requests import Encoding
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE, Message

M = TypeVar("M")

CONTENT_TYPE_JSON = "application/json"
CONTENT_TYPE_MSGPACK = "application/msgpack"
CONTENT_TYPES = {Encoding.JSON: CONTENT_TYPE_JSON, Encoding.MSGPACK: CONTENT_TYPE_MSGPACK}


def encode(message: Message, encoding: Encoding = Encoding.MSGPACK) -> bytes:
    """One message as bytes. JSON has byte strings in base64."""
    return msgspec.json.encode(message) if encoding is Encoding.JSON else msgspec.msgpack.encode(message)


def detect_encoding(data: bytes, headers: Mapping[str, str] | None = None) -> Encoding:
    """How a message was written: its `content-type` says it; without one, a first byte `{` means JSON."""
    for name, value in (headers or {}).items():
        if name.lower() == HEADER_CONTENT_TYPE:
            return Encoding.JSON if value.lower().startswith(CONTENT_TYPE_JSON) else Encoding.MSGPACK
    return Encoding.JSON if data.lstrip(b" \t\r\n")[:1] == b"{" else Encoding.MSGPACK


class Decoder(Generic[M]):
    """Reads one message type, or a tagged union (an inbox). Make it once and keep it."""

    def __init__(self, message_type: type[M] | UnionType) -> None:
        self._msgpack: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._json: msgspec.json.Decoder[M] = msgspec.json.Decoder(message_type)
        self._expected = _describe(message_type)

    def decode(self, data: bytes, headers: Mapping[str, str] | None = None) -> M:
        """Raises `Undecodable`, and nothing else, whatever the bytes."""
        encoding = detect_encoding(data, headers)
        try:
            return self._json.decode(data) if encoding is Encoding.JSON else self._msgpack.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError) as error:
            raise Undecodable(f"{len(data):,} bytes of {encoding} are no {self._expected}: {error}") from error
        except RecursionError as error:
            raise Undecodable(
                f"{len(data):,} bytes of {encoding} are no {self._expected}: nested too deeply"
            ) from error


@overload
def decode(data: bytes, message_type: type[M], headers: Mapping[str, str] | None = None) -> M: ...
@overload
def decode(data: bytes, message_type: UnionType, headers: Mapping[str, str] | None = None) -> object: ...
def decode(data: bytes, message_type: type[M] | UnionType, headers: Mapping[str, str] | None = None) -> M | object:
    """Read one message. For many of one type, keep a `Decoder`. Raises `Undecodable`."""
    return Decoder[M](message_type).decode(data, headers)


def _describe(message_type: type[M] | UnionType) -> str:
    if isinstance(message_type, UnionType):
        return " or ".join(getattr(member, "__name__", str(member)) for member in message_type.__args__)
    return message_type.__name__
