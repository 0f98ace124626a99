"""`halfmoon cache`: from options to an exit code."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from halfmoon.bus.protocol import Bus
from halfmoon.cli.cache_ask import CacheClient, CacheError
from halfmoon.cli.cache_prompts import Prompt, PromptFileError, read_keys, read_prompts
from halfmoon.cli.cache_report import Listing, Stat, listing, stat_of
from halfmoon.cli.cache_screen import print_flush, print_listing, print_pins, print_stat, print_warmed, warming
from halfmoon.cli.cache_warm import Warmed, Warmer
from halfmoon.cli.connection import NotConnected, connected
from halfmoon.config import CommonConfig
from halfmoon.schemas.chunks import Tier
from halfmoon.schemas.ids import ChunkKey, ModelName, TenantId
from halfmoon.schemas.listing import ChunkOrder, ListChunks
from halfmoon.schemas.orders import PinOrder, Selection
from halfmoon.schemas.prompts import PromptChunks
from halfmoon.schemas.registry import Flushed, PinsChanged

R = TypeVar("R")

EXIT_INCOMPLETE = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class LsOptions:
    tenant: str | None = None
    model: str | None = None
    nodes: tuple[str, ...] = ()
    tier: str | None = None
    ends_only: bool = False
    sort: str = "hits"
    limit: int = 40
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    files: tuple[Path, ...]
    keys: tuple[str, ...]
    tenant: str
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    tenant: str | None
    model: str | None
    prefixes: tuple[Path, ...]
    keys: tuple[str, ...]
    everything: bool

    @property
    def has_conditions(self) -> bool:
        return bool(self.tenant or self.model or self.prefixes or self.keys)

    def words(self) -> str:
        """As it is asked whether that is meant."""
        if self.everything:
            return "the whole cache"
        parts = [f"tenant {self.tenant}"] * bool(self.tenant) + [f"model {self.model}"] * bool(self.model)
        parts += [str(path) for path in self.prefixes] + [f"chunk {key[:12]}…" for key in self.keys]
        return "what is cached of " + ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    file: Path
    is_whole: bool
    tenant: str
    model: str | None
    concurrency: int
    timeout_s: float
    service_class: str


def run_ls(options: LsOptions, config: CommonConfig, console: Console, *, as_json: bool) -> int:
    async def ask(bus: Bus) -> Listing:
        ask = ListChunks(
            selection=_selection(options.tenant, options.model),
            tier=None if options.tier is None else Tier(options.tier),
            order=ChunkOrder(options.sort),
            ends_only=options.ends_only,
            after=None if options.after is None else read_keys([options.after])[0],
        )
        client = CacheClient(bus)
        nodes = [beat.node for beat in (await client.members())[1]]
        if unknown := sorted(set(options.nodes) - set(nodes)):
            raise CacheError(f"there is no node {unknown[0]!r}; there is {', '.join(nodes) or 'none'}")
        wanted = [node for node in nodes if not options.nodes or node in options.nodes]
        return listing(*await client.held(wanted, ask, options.limit), ask.order, options.limit)

    def show(found: Listing) -> None:
        print_listing(console, found, time.time_ns(), of_prefixes=options.ends_only)

    return _run("ls", config, ask, show, lambda found: not found.failed, as_json=as_json)


def run_stat(config: CommonConfig, console: Console, *, as_json: bool) -> int:
    async def ask(bus: Bus) -> Stat:
        client = CacheClient(bus)
        members, nodes = await client.members()
        return stat_of(members, nodes, await client.stats([beat.node for beat in nodes]))

    return _run(
        "stat", config, ask, lambda stat: print_stat(console, stat), lambda stat: not stat.failed, as_json=as_json
    )


def run_pin(options: PromptOptions, config: CommonConfig, console: Console, *, as_json: bool) -> int:
    async def ask(bus: Bus) -> PinsChanged:
        client = CacheClient(bus)
        cuts = await client.cut_all(_prompts(options.files), options.tenant, options.model)
        pins = [PinOrder(key=key) for key in read_keys(options.keys)]
        pins += [pin for cut in cuts for pin in _pins(cut)]
        if not pins:
            raise CacheError(f"no prompt is as long as one chunk of {cuts[0].chunk_tokens} tokens: nothing to pin")
        return await client.pin(pins)

    def is_well(done: PinsChanged) -> bool:
        return not any(each.error or each.num_refused for each in done.nodes)

    return _run("pin", config, ask, lambda done: print_pins(console, done, "pinned"), is_well, as_json=as_json)


def run_unpin(
    options: PromptOptions, config: CommonConfig, console: Console, *, as_json: bool, everything: bool
) -> int:
    async def ask(bus: Bus) -> PinsChanged:
        client = CacheClient(bus)
        if everything:
            return await client.unpin(Selection(everything=True))
        cuts = await client.cut_all(_prompts(options.files), options.tenant, options.model)
        keys = (*read_keys(options.keys), *(key for cut in cuts for key in cut.keys))
        if not keys:
            raise CacheError(f"no prompt is as long as one chunk of {cuts[0].chunk_tokens} tokens: nothing to unpin")
        return await client.unpin(Selection(keys=keys))

    def is_well(done: PinsChanged) -> bool:
        return not any(each.error for each in done.nodes)

    return _run("unpin", config, ask, lambda done: print_pins(console, done, "unpinned"), is_well, as_json=as_json)


def run_flush(options: FlushOptions, config: CommonConfig, console: Console, *, as_json: bool) -> int:
    async def ask(bus: Bus) -> Flushed:
        client = CacheClient(bus)
        if options.everything:
            return await client.flush(Selection(everything=True))
        prompts = _prompts(options.prefixes)
        cuts = await client.cut_all(prompts, options.tenant or "default", options.model)
        if short := [cut for cut in cuts if not cut.keys]:
            raise CacheError(
                f"a prompt of {short[0].num_tokens} tokens is shorter than one chunk of {short[0].chunk_tokens}: "
                "no cached prefix ends in it"
            )
        selection = _selection(options.tenant, options.model)
        return await client.flush(
            Selection(
                # The tenant has gone into the keys of its prompts; who else shares its salt shares what is flushed.
                tenant=None if prompts else selection.tenant,
                model=None if prompts else selection.model,
                keys=tuple(key for cut in cuts for key in cut.keys[:-1]),
                prefixes=(*read_keys(options.keys), *(cut.keys[-1] for cut in cuts)),
            )
        )

    def is_well(done: Flushed) -> bool:
        return not (any(node.error for node in done.nodes) or any(worker.error for worker in done.workers))

    return _run("flush", config, ask, lambda done: print_flush(console, done), is_well, as_json=as_json)


def run_warm(options: WarmOptions, config: CommonConfig, console: Console, *, as_json: bool) -> int:
    async def ask(bus: Bus) -> Warmed:
        prompts = read_prompts(options.file, by_line=not options.is_whole)
        with warming(Console(stderr=True), len(prompts)) as on_progress:
            warmer = Warmer(
                bus,
                tenant=options.tenant,
                model=options.model,
                concurrency=options.concurrency,
                timeout_s=options.timeout_s,
                service_class=options.service_class,
                on_progress=on_progress,
            )
            return await warmer.run(prompts)

    return _run(
        "warm",
        config,
        ask,
        lambda done: print_warmed(console, done),
        lambda done: not (done.num_failed or done.num_missing),
        as_json=as_json,
    )


def _run(
    command: str,
    config: CommonConfig,
    ask: Callable[[Bus], Awaitable[R]],
    show: Callable[[R], None],
    is_well: Callable[[R], bool],
    *,
    as_json: bool,
) -> int:
    async def connect_and_ask() -> R:
        async with connected(config, "cache") as bus:
            return await ask(bus)

    try:
        answer = asyncio.run(connect_and_ask())
    except (CacheError, PromptFileError, NotConnected) as error:
        Console(stderr=True).print(
            f"halfmoon cache {command}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return EXIT_REFUSED
    except KeyboardInterrupt:
        Console(stderr=True).print(f"halfmoon cache {command}: interrupted", markup=False, highlight=False)
        return EXIT_INTERRUPTED
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(_whole(answer)), indent=2).decode() + "\n")
    else:
        show(answer)
    return 0 if is_well(answer) else EXIT_INCOMPLETE


def _whole(value: object) -> object:
    """With every field, also those that messages leave out because they are as they always are."""
    match value:
        case msgspec.Struct():
            return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
        case list() | tuple():
            return [_whole(each) for each in value]
        case dict():
            return {str(key): _whole(each) for key, each in value.items()}
        case _:
            return value


def _selection(tenant: str | None, model: str | None) -> Selection:
    return Selection(
        tenant=None if tenant is None else TenantId(tenant),
        model=None if model is None else ModelName(model),
        everything=tenant is None and model is None,
    )


def _prompts(files: tuple[Path, ...]) -> list[Prompt]:
    return [prompt for path in files for prompt in read_prompts(path, by_line=False)]


def _pins(cut: PromptChunks) -> list[PinOrder]:
    parents: list[ChunkKey | None] = [None, *cut.keys]
    return [
        PinOrder(key=key, model=cut.model, tenant=cut.tenant, parent=parent)
        for key, parent in zip(cut.keys, parents, strict=False)
    ]
