"""Messages that prove that their sender knows the cluster's secret (HMAC-SHA256, RFC 2104).

Each proof covers the whole message, tag and all. Answers carry the nonce or the sequence number of their question, so
an old answer doesn't pass for a new one; questions carry a nonce of the server's, good once, or name a connection.
Where a newer version sends a field that this one doesn't know, its proof fails here, and another transport is used.
"""

import hmac
import secrets
from typing import TypeVar

import msgspec

from halfmoon.schemas.wire import Message

NONCE_BYTES = 32

M = TypeVar("M", bound=Message)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def signed(secret: bytes, message: M) -> M:
    """The same message, with its proof."""
    return msgspec.structs.replace(message, proof=_digest(secret, message))


def is_proven(secret: bytes, message: Message, proof: bytes) -> bool:
    return hmac.compare_digest(_digest(secret, message), proof)


def _digest(secret: bytes, message: Message) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode(msgspec.structs.replace(message, proof=b"")), "sha256")
