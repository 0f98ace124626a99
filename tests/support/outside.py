"""A client that knows nothing of halfmoon but its messages: plain nats-py and msgpack."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import nats
from nats.aio.client import Client

TIMEOUT_S = 50.0


@dataclass(slots=True)
class Answer:
    """All that came for one request."""

    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def terminal(self) -> dict[str, Any]:
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.get("tokens", ())]

    @property
    def text(self) -> str:
        return "".join(str(event.get("text", "")) for event in self.events)

    @property
    def usage(self) -> dict[str, int]:
        return {"cached_tokens": 0} | dict(self.terminal["usage"])


@dataclass(slots=True)
class OutsideClient:
    connection: Client
    model: str

    async def ask(self, *, sampling: Mapping[str, object], tenant: str | None = None, **prompt: object) -> Answer:
        """Submit `prompt=…`, `tokens=…` or `messages=…`, and wait for the terminal message; then for none after it."""
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        request: dict[str, object] = {
            "type": "request.submitted.v1",
            "request_id": f"test-{uuid.uuid4()}",
            "sampling": dict(sampling),
            **prompt,
        }
        if tenant is not None:
            request["tenant"] = tenant
        headers = {"halfmoon-reply": inbox, "halfmoon-deadline": str(time.time_ns() + int(TIMEOUT_S * 1e9))}
        await self.connection.jetstream().publish(
            f"halfmoon.request.{self.model}", msgpack.packb(request), headers=headers
        )
        answer = Answer()
        try:
            while not answer.events or answer.terminal["type"] == "tokens.v1":
                message = await subscription.next_msg(TIMEOUT_S)
                answer.events.append(msgpack.unpackb(message.data))
        finally:
            await subscription.unsubscribe()
        return answer

    async def ask_all(self, prompts: Sequence[Sequence[int]], *, sampling: Mapping[str, object]) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(tokens=list(each), sampling=sampling) for each in prompts)))


@asynccontextmanager
async def outside_client(url: str, model: str) -> AsyncIterator[OutsideClient]:
    connection = await nats.connect(url)
    try:
        yield OutsideClient(connection, model)
    finally:
        await connection.close()
