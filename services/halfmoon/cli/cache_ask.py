"""Asking a cluster about its cache, and telling it: the messages behind `halfmoon cache`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError, NoResponders, RemoteError
from halfmoon.bus.protocol import Bus
from halfmoon.cli.cache_prompts import Prompt
from halfmoon.cli.cache_report import LiveHeartbeat
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ChunkKey, ModelName, NodeId, TenantId
from halfmoon.schemas.listing import ChunkList, ChunkOrder, HeldChunk, ListChunks
from halfmoon.schemas.members import NodeHeartbeat
from halfmoon.schemas.orders import PinOrder, Selection
from halfmoon.schemas.pool_stats import PoolStats, Stats
from halfmoon.schemas.prompts import PromptChunks, PromptKeys
from halfmoon.schemas.registry import (
    Flush,
    Flushed,
    LookedUp,
    Lookup,
    MemberList,
    Members,
    NodePins,
    Pin,
    PinsChanged,
    Unpin,
)
from halfmoon.schemas.wire import Message

R = TypeVar("R")

_CALL_S = 5.0
_ORDER_S = 30.0
_MAX_LOOKUP = 1000
_MAX_PAGE = 4096
_MAX_PINS = 4096
_PROMPTS_AT_ONCE = 8


class CacheError(Exception):
    """What was asked can't be had; the message says why, and what to do."""


class CacheClient:
    """Raises `CacheError` for whatever goes wrong with a question to the whole cluster; a node that doesn't answer is
    reported beside what the others say."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def members(self) -> tuple[list[LiveHeartbeat], list[NodeHeartbeat]]:
        """All, and the nodes among them, each once; by name."""
        listed = await self._registry("members", Members(), MemberList, _CALL_S)
        members = sorted(listed.members, key=lambda beat: beat.worker)
        nodes = {beat.node: beat for beat in members if isinstance(beat, NodeHeartbeat)}
        return members, [nodes[node] for node in sorted(nodes)]

    async def stats(self, nodes: Iterable[NodeId]) -> dict[NodeId, PoolStats | str]:
        """Or why there are none."""
        return await self._each(nodes, lambda node: self._node(node, "stats", Stats(), PoolStats))

    async def held(
        self, nodes: Sequence[NodeId], ask: ListChunks, limit: int
    ) -> tuple[dict[NodeId, list[HeldChunk]], int, dict[NodeId, str]]:
        """For each node its first `limit` chunks, how many there are of all, and which nodes didn't answer."""
        found: dict[NodeId, list[HeldChunk]] = {}
        failed: dict[NodeId, str] = {}
        num_matching = 0

        async def pages(node: NodeId) -> tuple[list[HeldChunk], int]:
            chunks: list[HeldChunk] = []
            total: int | None = None
            after = ask.after
            while len(chunks) < limit:
                size = min(_MAX_PAGE, limit - len(chunks))
                page = await self._node(node, "list", msgspec.structs.replace(ask, after=after, limit=size), ChunkList)
                total = page.num_matching if total is None else total
                chunks += page.chunks
                if len(page.chunks) < size or ask.order is not ChunkOrder.KEY:
                    break
                after = chunks[-1].meta.key
            return chunks, total or 0

        for node, answer in (await self._each(nodes, pages)).items():
            if isinstance(answer, str):
                failed[node] = answer
            else:
                found[node], total = answer
                num_matching += total
        return found, num_matching, failed

    async def cut(self, prompt: Prompt, tenant: str, model: str | None) -> PromptChunks:
        """The prompt's chunks, as a conductor cuts it."""
        ask = PromptKeys(
            model=None if model is None else ModelName(model),
            tenant=TenantId(tenant),
            tokens=prompt.tokens,
            prompt=prompt.prompt,
            messages=prompt.messages,
        )
        try:
            return await call(self._bus, subjects.conductor("keys"), ask, PromptChunks, timeout_s=_CALL_S)
        except NoResponders:
            raise CacheError("no conductor answers: is the system up?") from None
        except BusError as error:
            raise CacheError(_words(error)) from None

    async def cut_all(self, prompts: Sequence[Prompt], tenant: str, model: str | None) -> list[PromptChunks]:
        """In order."""
        cuts: list[PromptChunks] = []
        for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
            some = prompts[start : start + _PROMPTS_AT_ONCE]
            cuts += await asyncio.gather(*(self.cut(prompt, tenant, model) for prompt in some))
        return cuts

    async def present(self, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """Those of these chunks that some node has."""
        present: set[ChunkKey] = set()
        for start in range(0, len(keys), _MAX_LOOKUP):
            some = tuple(keys[start : start + _MAX_LOOKUP])
            found = await self._registry("lookup", Lookup(keys=some), LookedUp, _CALL_S)
            present.update(key for key, placements in zip(some, found.placements, strict=True) if placements)
        return present

    async def flush(self, selection: Selection) -> Flushed:
        return await self._registry("flush", Flush(selection=selection), Flushed, _ORDER_S)

    async def pin(self, pins: Sequence[PinOrder]) -> PinsChanged:
        """In parts, where they are many."""
        parts = [pins[start : start + _MAX_PINS] for start in range(0, len(pins), _MAX_PINS)]
        return _together(
            [await self._registry("pin", Pin(chunks=tuple(part)), PinsChanged, _ORDER_S) for part in parts]
        )

    async def unpin(self, selection: Selection) -> PinsChanged:
        keys = selection.keys
        parts = [
            msgspec.structs.replace(selection, keys=keys[start : start + _MAX_PINS])
            for start in range(0, max(1, len(keys)), _MAX_PINS)
        ]
        return _together(
            [await self._registry("unpin", Unpin(selection=part), PinsChanged, _ORDER_S) for part in parts]
        )

    async def _registry(self, verb: str, message: Message, reply: type[R], timeout_s: float) -> R:
        try:
            return await call(self._bus, subjects.registry(verb), message, reply, timeout_s=timeout_s)
        except NoResponders:
            raise CacheError(
                "no registry takes orders now: is the system up? A new leader is there within seconds"
                if verb in ("flush", "pin", "unpin")
                else "no registry answers: is the system up?"
            ) from None
        except BusError as error:
            raise CacheError(_words(error)) from None

    async def _node(self, node: NodeId, verb: str, message: Message, reply: type[R]) -> R:
        return await call(self._bus, f"{subjects.kv_tier(node)}.{verb}", message, reply, timeout_s=_CALL_S)

    async def _each(self, nodes: Iterable[NodeId], ask: Callable[[NodeId], Awaitable[R]]) -> dict[NodeId, R | str]:
        async def one(node: NodeId) -> R | str:
            try:
                return await ask(node)
            except BusError as error:
                return _words(error)

        nodes = list(nodes)
        return dict(zip(nodes, await asyncio.gather(*(one(node) for node in nodes)), strict=True))


def _together(changes: Sequence[PinsChanged]) -> PinsChanged:
    """Several parts of one order, as one."""
    nodes: dict[NodeId, NodePins] = {}
    for change in changes:
        for each in change.nodes:
            before = nodes.get(each.node, NodePins(node=each.node))
            nodes[each.node] = NodePins(
                node=each.node,
                num_pinned=before.num_pinned + each.num_pinned,
                num_absent=before.num_absent + each.num_absent,
                num_refused=before.num_refused + each.num_refused,
                max_slots=each.max_slots,
                error=before.error or each.error,
            )
    last = changes[-1]
    num_changed = sum(change.num_changed for change in changes)
    return PinsChanged(seq=last.seq, num_changed=num_changed, num_pins=last.num_pins, nodes=tuple(nodes.values()))


def _words(error: BusError) -> str:
    return error.error.message if isinstance(error, RemoteError) else str(error)
