"""A steady load of requests on a running system, straight over NATS, with the text that each must be answered by.

The engine is `sim`: what it says is a function of every byte of the prompt's KV (`halfmoon.engine.sim.tokens`), so a
wrong byte anywhere, a doubled token or a lost one shows.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from halfmoon.engine.sim.tokens import completion_seed, completion_token, prompt_kv
from support.wait import until

NUM_STEMS, STEM_TOKENS = 12, 320
DEADLINE_S = 40.0
"""Of each request."""
_CLEAN = {"no_workers", "overloaded", "busy", "no_space", "worker_lost", "unavailable", "deadline_exceeded"}
"""How a request may fail while the system is being harmed."""


@dataclass(slots=True)
class Asked:
    """One request, and all that came for it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    asked_s: float
    is_cancelled: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] != "tokens.v1"]

    @property
    def outcome(self) -> str:
        """`finished`, or the code of its error."""
        return "finished" if self.ends[0]["type"] == "finished.v1" else str(self.ends[0]["error"]["code"])

    def check(self, vocab_size: int) -> None:
        """It has ended once, in a way that it may; what was said is what should be, without gap, whole if it finished.
        A repeat of numbered tokens, as after a hand-over, is none where it says the same."""
        assert len(self.ends) == 1, (self.request_id, self.ends)
        seed = completion_seed(b"".join(prompt_kv(self.prompt)))
        expected = [completion_token(seed, position, vocab_size) for position in range(self.max_tokens)]
        num_heard = 0
        for event in self.events:
            if event["type"] == "tokens.v1":
                first, tokens = event["seq"], list(event["tokens"])
                assert first <= num_heard, (self.request_id, "a gap", self.events)
                assert tokens == expected[first : first + len(tokens)], (self.request_id, "wrong tokens", self.events)
                num_heard = max(num_heard, first + len(tokens))
        if self.outcome == "finished":
            assert num_heard == self.max_tokens, (self.request_id, self.events)
        else:
            allowed = _CLEAN | ({"cancelled"} if self.is_cancelled else set())
            assert self.outcome in allowed, (self.request_id, self.ends)


class Load:
    """`num_clients` that each ask one thing after the other, until `stop`."""

    def __init__(self, connection: Client, model: str, vocab_size: int, seed: int) -> None:
        self.connection = connection
        self._model = model
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._inbox = connection.new_inbox()
        self._stems = [self._draw(STEM_TOKENS) for _ in range(NUM_STEMS)]
        self._name = f"load-{time.time_ns():x}"
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []
        self.asked: dict[str, Asked] = {}

    async def listen(self) -> None:
        await self.connection.subscribe(f"{self._inbox}.*", cb=self._hear)

    def start(self, num_clients: int, *, cancel_share: float = 0.0) -> None:
        self._is_over = False
        self._clients = [asyncio.create_task(self._ask_on(cancel_share)) for _ in range(num_clients)]

    async def stop(self) -> None:
        """Return once all that was asked has ended."""
        self._is_over = True
        await asyncio.gather(*self._clients)

    @property
    def num_finished(self) -> int:
        return self.outcomes()["finished"]

    def outcomes(self) -> Counter[str]:
        return Counter(each.outcome for each in self.asked.values() if each.ends)

    def check(self) -> None:
        for each in self.asked.values():
            each.check(self._vocab_size)

    async def ask(self, *, cancel_after_s: float | None = None) -> Asked:
        """One request, to its end: a stem that others have too, and a rest of its own."""
        draw = self._random
        prompt = draw.choice(self._stems)[: draw.randrange(1, STEM_TOKENS)] + self._draw(draw.randrange(1, 80))
        asked = Asked(f"{self._name}-{len(self.asked)}", prompt, draw.randrange(1, 33), time.monotonic())
        self.asked[asked.request_id] = asked
        await self._submit(asked)
        if cancel_after_s is not None:
            await asyncio.sleep(cancel_after_s)
            asked.is_cancelled = True
            cancel = {"type": "request.cancel.v1", "request_id": asked.request_id}
            await self.connection.publish("halfmoon.request.cancel", msgpack.packb(cancel))
        await until(lambda: asked.ends, DEADLINE_S + 30, what=f"{asked.request_id} has ended")
        return asked

    async def _ask_on(self, cancel_share: float) -> None:
        while not self._is_over:
            is_cancelled = self._random.random() < cancel_share
            await self.ask(cancel_after_s=self._random.expovariate(10) if is_cancelled else None)

    async def _submit(self, asked: Asked) -> None:
        """Again until it is acknowledged: an id that is there already is not asked twice."""
        deadline_ns = time.time_ns() + int(DEADLINE_S * 1e9)
        headers = {
            "halfmoon-reply": f"{self._inbox}.{asked.request_id}",
            "halfmoon-deadline": str(deadline_ns),
            "Nats-Msg-Id": asked.request_id,
        }
        sampling = {"temperature": 0, "max_tokens": asked.max_tokens, "ignore_eos": True}
        request = {
            "type": "request.submitted.v1",
            "request_id": asked.request_id,
            "tokens": asked.prompt,
            "sampling": sampling,
        }
        while True:
            try:
                await self.connection.jetstream().publish(
                    f"halfmoon.request.{self._model}", msgpack.packb(request), timeout=2, headers=headers
                )
            except (nats.errors.Error, TimeoutError):
                assert time.time_ns() < deadline_ns, f"{asked.request_id} can't be submitted"
            else:
                return

    async def _hear(self, message: Msg) -> None:
        asked = self.asked[message.subject.rsplit(".", 1)[1]]
        asked.events.append(msgpack.unpackb(message.data))

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(1000, self._vocab_size) for _ in range(count)]


@asynccontextmanager
async def load_on(url: str, model: str, vocab_size: int, seed: int) -> AsyncIterator[Load]:
    connection = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.2)
    try:
        load = Load(connection, model, vocab_size, seed)
        await load.listen()
        yield load
    finally:
        await connection.close()
