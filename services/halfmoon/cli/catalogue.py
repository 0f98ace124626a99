"""Every subject, and the messages that travel on it: what the AsyncAPI document and the messages page are made from."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass

from halfmoon.schemas import subjects
from halfmoon.schemas.caches import WorkerCache
from halfmoon.schemas.chunks import ChunkEvicted, ChunkRegistered, NodeCleared
from halfmoon.schemas.copies import AskSurplus, CopiesReply, Replicate
from halfmoon.schemas.kv_tier import Done, KvTierReply, KvTierRequest
from halfmoon.schemas.members import Heartbeat
from halfmoon.schemas.orders import Forget, Forgotten
from halfmoon.schemas.prompts import ConductorReply, ConductorRequest
from halfmoon.schemas.rdma import RdmaReply, RdmaRequest
from halfmoon.schemas.registry import MemberEvent, RegistryReply, RegistryRequest
from halfmoon.schemas.requests import RequestCancel, RequestSubmitted, TokenEvent
from halfmoon.schemas.splits import (
    DecodeHalf,
    HalfAccepted,
    HalfClaim,
    HalfClaimed,
    HalfEnded,
    KvInbox,
    PrefillHalf,
    RequestTaken,
    TransferDone,
)
from halfmoon.schemas.wire import Error, Message

_PAGE_HEAD = """\
# Messages

Generated from the structs in `schemas/`; `make docs` writes it anew, and `asyncapi.yaml` with it.

MessagePack maps; the key `type` names the message and its version. Requests and token events may also be JSON. New
fields come only with defaults, so readers skip what they don't know. Headers: `traceparent` (W3C trace context),
`halfmoon-deadline` (Unix nanoseconds), `halfmoon-reply` (subject for token events), `content-type`.
"""


@dataclass(frozen=True, slots=True)
class Channel:
    name: str
    address: str
    what: str
    messages: tuple[type[Message], ...]


def _members(union: object) -> tuple[type[Message], ...]:
    return typing.cast("tuple[type[Message], ...]", typing.get_args(union) or (union,))


def channels() -> Sequence[Channel]:
    """Every subject, with the messages that travel on it."""
    p = subjects.PREFIX
    return (
        Channel(
            "requests",
            f"{p}.request.{{model}}",
            f"JetStream work queue {subjects.REQUESTS_STREAM}: submitted requests, acknowledged at their end.",
            (RequestSubmitted,),
        ),
        Channel(
            "generate",
            f"{p}.generate.{{model}}",
            "Plain NATS request: the events come on the caller's own reply subject.",
            (RequestSubmitted,),
        ),
        Channel(
            "tokens",
            "{reply}",
            "Where the submitter said: any number of tokens.v1, then exactly one of finished.v1 and failed.v1.",
            _members(TokenEvent),
        ),
        Channel("cancel", subjects.CANCEL, "Stop a request, wherever it is.", (RequestCancel,)),
        Channel(
            "splitPrefill",
            f"{p}.request.split.prefill.{{worker}}",
            "Request-reply: a prefill half, answered at once. And the decode worker's word that it is done.",
            (PrefillHalf, TransferDone, HalfAccepted, Error),
        ),
        Channel(
            "splitDecode",
            f"{p}.request.split.decode.{{worker}}",
            "Request-reply: a decode half, answered at once.",
            (DecodeHalf, HalfAccepted, Error),
        ),
        Channel("ended", f"{p}.request.ended.{{conductor}}", "A half has reached its end.", (HalfEnded,)),
        Channel(
            "claim",
            subjects.CLAIM,
            "Request-reply: whether a request is still the decode worker's that asks.",
            (HalfClaim, HalfClaimed, Error),
        ),
        Channel(
            "taken",
            subjects.TAKEN,
            "A conductor has got a request that another had been given before.",
            (RequestTaken,),
        ),
        Channel(
            "kvReady",
            f"{p}.kv.ready.{{decode worker}}",
            "Chunks of a transfer as they become readable.",
            _members(KvInbox),
        ),
        Channel(
            "chunkRegistered",
            f"{p}.chunk.registered.{{node}}",
            f"JetStream stream {subjects.CHUNKS_STREAM}: chunks that can now be read on a node.",
            (ChunkRegistered, NodeCleared),
        ),
        Channel(
            "evict",
            f"{p}.evict.{{node}}",
            f"JetStream stream {subjects.CHUNKS_STREAM}: chunks that are gone from a node.",
            (ChunkEvicted,),
        ),
        Channel(
            "kvTier",
            f"{p}.kvtier.{{node}}.{{verb}}",
            "Request-reply: describe, acquire, reserve, commit, release, renew, report, stats, probe, inventory, "
            "retell, list; and from the registry: flush, pin, unpin, catch_up.",
            (*_members(KvTierRequest), *_members(KvTierReply)),
        ),
        Channel(
            "kvTierRdma",
            f"{p}.kvtier.{{node}}.rdma_{{verb}}",
            "Request-reply: hello, connect, grant, disconnect; what nodes say to each other to read over RDMA.",
            (*_members(RdmaRequest), *_members(RdmaReply), Done, Error),
        ),
        Channel(
            "kvTierReplicate",
            f"{p}.kvtier.{{node}}.replicate",
            "Request-reply: bring chunks here without a request for them.",
            (Replicate, *_members(CopiesReply)),
        ),
        Channel(
            "surplus",
            subjects.SURPLUS,
            "Request-reply, to any conductor: which of a pool's chunks are on enough other nodes.",
            (AskSurplus, *_members(CopiesReply)),
        ),
        Channel("heartbeat", f"{p}.worker.{{id}}.heartbeat", "Every 250 ms or faster.", _members(Heartbeat)),
        Channel(
            "cache",
            f"{p}.worker.{{id}}.cache",
            "What an engine's own prefix cache holds: changes with each heartbeat, all of it every 10 s.",
            _members(WorkerCache),
        ),
        Channel(
            "forget",
            f"{p}.worker.{{id}}.forget",
            "Request-reply: the registry tells a worker of a flush.",
            (Forget, Forgotten, Error),
        ),
        Channel(
            "conductor",
            f"{p}.conductor.{{verb}}",
            "Request-reply: keys, of a prompt's chunks.",
            (*_members(ConductorRequest), *_members(ConductorReply)),
        ),
        Channel("member", f"{p}.member.{{id}}", "Who came and who is gone, by the registry.", _members(MemberEvent)),
        Channel(
            "registry",
            f"{p}.registry.{{verb}}",
            "Request-reply: lookup, snapshot, members, orders; and by the one that leads: flush, pin, unpin.",
            (*_members(RegistryRequest), *_members(RegistryReply)),
        ),
    )


def tag(message: type[Message]) -> str:
    """The value of `type` on the wire, such as `kv.ready.v1`."""
    return str(message.__struct_config__.tag)


def summary(message: type[Message]) -> str:
    """The first sentence of a message's docstring; empty where it has none of its own."""
    if message.__doc__ is None or message.__doc__ == Message.__doc__:
        return ""
    return " ".join(message.__doc__.strip().split("\n\n")[0].split())


def markdown_page() -> str:
    """`docs/messages.md`."""
    lines = [_PAGE_HEAD]
    for channel in channels():
        lines += [f"## `{channel.address}`", "", channel.what, "", "| `type` | fields | meaning |", "|---|---|---|"]
        for message in channel.messages:
            fields = ", ".join(f"`{field}`" for field in message.__struct_fields__)
            lines.append(f"| `{tag(message)}` | {fields} | {summary(message).replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)
