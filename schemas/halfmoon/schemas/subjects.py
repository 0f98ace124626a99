"""Every NATS subject and stream, built in one place.

A subject's tokens are separated by dots and may hold neither blanks nor wildcards; names from outside (models, nodes,
workers) are escaped on the way in, as `%` and two hex digits, so that `org/model-1.5` is one token.
"""

import re

from halfmoon.schemas.ids import ModelName, NodeId, WorkerId

PREFIX = "halfmoon"

REQUESTS_STREAM = "REQUESTS"
"""Work queue of submitted requests."""

CHUNKS_STREAM = "CHUNKS"
"""Chunk events of all nodes."""

REQUEST_ALL = f"{PREFIX}.request.*"
"""What `REQUESTS` captures: submissions, and cancels with them (so no model can be called `cancel`)."""

GENERATE_ALL = f"{PREFIX}.generate.*"
CANCEL = f"{PREFIX}.request.cancel"
CLAIM = f"{PREFIX}.request.owner.claim"
TAKEN = f"{PREFIX}.request.owner.taken"
SPLIT_ALL = f"{PREFIX}.request.split.>"
SPLIT_DECODE_ALL = f"{PREFIX}.request.split.decode.*"
ENDED_ALL = f"{PREFIX}.request.ended.*"
CHUNK_EVENTS = (f"{PREFIX}.chunk.registered.*", f"{PREFIX}.evict.*")
HEARTBEAT_ALL = f"{PREFIX}.worker.*.heartbeat"
SURPLUS = f"{PREFIX}.conductor.surplus"
EVICT_ALL = f"{PREFIX}.evict.*"
CACHE_ALL = f"{PREFIX}.worker.*.cache"
MEMBER_EVENTS = f"{PREFIX}.member.*"

_UNSAFE = re.compile(r"[\s.*>%\x00-\x1f\x7f]")


def token(name: str) -> str:
    """`name` as one subject token. Raises ValueError where it is empty."""
    if not name:
        raise ValueError("a name in a subject must not be empty")
    return _UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found.group().encode()), name)


def untoken(escaped: str) -> str:
    """The name behind a subject token."""
    return re.sub(
        r"(?:%[0-9A-F]{2})+",
        lambda found: bytes.fromhex(found.group().replace("%", "")).decode(errors="replace"),
        escaped,
    )


def request(model: ModelName) -> str:
    """Where requests are submitted; captured by the stream `REQUESTS`."""
    return f"{PREFIX}.request.{token(model)}"


def generate(model: ModelName) -> str:
    """Where a plain NATS request is answered by token events on its own reply subject."""
    return f"{PREFIX}.generate.{token(model)}"


def split_prefill(worker: WorkerId) -> str:
    return f"{PREFIX}.request.split.prefill.{token(worker)}"


def split_decode(worker: WorkerId) -> str:
    return f"{PREFIX}.request.split.decode.{token(worker)}"


def ended(conductor: WorkerId) -> str:
    """Where workers tell a request's conductor that a half has ended. All conductors listen."""
    return f"{PREFIX}.request.ended.{token(conductor)}"


def kv_ready(decode_worker: WorkerId) -> str:
    return f"{PREFIX}.kv.ready.{token(decode_worker)}"


def chunk_registered(node: NodeId) -> str:
    return f"{PREFIX}.chunk.registered.{token(node)}"


def evict(node: NodeId) -> str:
    return f"{PREFIX}.evict.{token(node)}"


def kv_tier(node: NodeId) -> str:
    """All verbs of one pool: append the verb."""
    return f"{PREFIX}.kvtier.{token(node)}"


def heartbeat(worker: WorkerId) -> str:
    return f"{PREFIX}.worker.{token(worker)}.heartbeat"


def cache(worker: WorkerId) -> str:
    """Where a worker tells what its engine's prefix cache holds."""
    return f"{PREFIX}.worker.{token(worker)}.cache"


def forget(worker: WorkerId) -> str:
    """Where a worker is told of flushes."""
    return f"{PREFIX}.worker.{token(worker)}.forget"


def conductor(verb: str) -> str:
    return f"{PREFIX}.conductor.{verb}"


def member(worker: WorkerId) -> str:
    return f"{PREFIX}.member.{token(worker)}"


def registry(verb: str) -> str:
    return f"{PREFIX}.registry.{verb}"
