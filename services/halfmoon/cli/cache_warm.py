"""Filling the cache: each prompt is prefilled, a few at a time, unless its chunks are there already."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec

from halfmoon.bus.protocol import Bus
from halfmoon.cli.cache_ask import CacheClient, CacheError
from halfmoon.cli.cache_prompts import Prompt
from halfmoon.client import GenerateClient
from halfmoon.schemas.ids import ChunkKey
from halfmoon.schemas.prompts import PromptChunks
from halfmoon.schemas.requests import Failed, Finished, RequestSubmitted, Sampling

_SETTLE_S = 3.0
"""How long the registry may take to know of chunks that were made."""
_LOOK_S = 0.1
_MAX_ERRORS = 20
"""Told one by one."""


class Warmed(msgspec.Struct, kw_only=True):
    """What came of it. Chunks that prompts share are counted once."""

    num_prompts: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_too_short: int = 0
    """Prompts without a whole chunk: there is nothing of them to keep."""
    num_chunks: int = 0
    num_there: int = 0
    """Chunks that were cached before."""
    num_new: int = 0
    num_missing: int = 0
    """Chunks that were computed and aren't cached: the pools had no room, or have evicted them again."""
    num_tokens: int = 0
    """Of the prompts that were run."""
    seconds: float = 0.0
    errors: list[str] = msgspec.field(default_factory=list)
    """The first of them, by the number of the prompt in the file."""


class Warmer:
    """One file's worth."""

    def __init__(
        self,
        bus: Bus,
        *,
        tenant: str,
        model: str | None,
        concurrency: int,
        timeout_s: float,
        service_class: str,
        on_progress: Callable[[Warmed], None],
    ) -> None:
        self._bus = bus
        self._cache = CacheClient(bus)
        self._tenant = tenant
        self._model = model
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._class = service_class
        self._on_progress = on_progress
        self._there: set[ChunkKey] = set()
        self._made: set[ChunkKey] = set()
        self.warmed = Warmed()

    async def run(self, prompts: Sequence[Prompt]) -> Warmed:
        """All of them. Raises `CacheError` where none can be run; what goes wrong with one is told at the end."""
        began_s = time.monotonic()
        self.warmed.num_prompts = len(prompts)
        waiting = iter(enumerate(prompts, start=1))
        async with GenerateClient(self._bus) as client:

            async def work() -> None:
                for number, prompt in waiting:
                    await self._one(client, number, prompt)
                    self.warmed.seconds = time.monotonic() - began_s
                    self._on_progress(self.warmed)

            # The first alone: where no conductor answers, or nobody serves the model, that is one error, not thousands.
            first, prompt = next(waiting)
            self._model = (await self._cache.cut(prompt, self._tenant, self._model)).model
            await self._one(client, first, prompt)
            self._on_progress(self.warmed)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(prompts) - 1)):
                    group.create_task(work())
        await self._count()
        self.warmed.seconds = time.monotonic() - began_s
        return self.warmed

    async def _one(self, client: GenerateClient, number: int, prompt: Prompt) -> None:
        try:
            cut = await self._cache.cut(prompt, self._tenant, self._model)
            if not cut.keys:
                self.warmed.num_too_short += 1
                return
            unseen = [key for key in cut.keys if key not in self._there and key not in self._made]
            present = await self._cache.present(unseen)
            self._there |= present
            if len(present) < len(unseen):
                self._made.update(key for key in unseen if key not in present)
                await self._generate(client, prompt, cut)
            self.warmed.num_done += 1
        except CacheError as error:
            self.warmed.num_failed += 1
            if len(self.warmed.errors) < _MAX_ERRORS:
                self.warmed.errors.append(f"prompt {number}: {error}")

    async def _generate(self, client: GenerateClient, prompt: Prompt, cut: PromptChunks) -> None:
        request = RequestSubmitted(
            model=cut.model,
            tenant=cut.tenant,
            tokens=prompt.tokens,
            prompt=prompt.prompt,
            messages=prompt.messages,
            sampling=Sampling(max_tokens=0),
            service_class=self._class,
        )
        deadline_ns = time.time_ns() + int(self._timeout_s * 1e9)
        async with aclosing(client.submit(request, deadline_ns=deadline_ns)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise CacheError(event.error.message)
                if isinstance(event, Finished):
                    self.warmed.num_tokens += event.usage.prompt_tokens

    async def _count(self) -> None:
        """Of the chunks that were to be made, those that are there; the registry hears of the last a moment later."""
        made = list(self._made)
        until_s = time.monotonic() + _SETTLE_S
        while True:
            present = await self._cache.present(made)
            if len(present) == len(made) or self.warmed.num_failed or time.monotonic() >= until_s:
                break
            await asyncio.sleep(_LOOK_S)
        self.warmed.num_there, self.warmed.num_new = len(self._there), len(present)
        self.warmed.num_missing = len(made) - len(present)
        self.warmed.num_chunks = len(self._there) + len(made)
