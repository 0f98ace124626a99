"""Answers which chunks a prompt has, as this conductor would cut it: same tokenizer, tenant salts and namespace."""

from halfmoon.bus.endpoint import Endpoint, Envelope, serve
from halfmoon.bus.errors import RemoteError
from halfmoon.bus.protocol import Bus, ServiceRecord
from halfmoon.chunks.keys import chunk_keys
from halfmoon.conductor.members import Members
from halfmoon.conductor.planning import Planner
from halfmoon.conductor.texts import Texts
from halfmoon.schemas import subjects
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.prompts import PromptChunks, PromptKeys
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.wire import Error, ErrorCode

QUEUE_GROUP = "conductor-keys"
_AT_ONCE = 4


class PromptCutter:
    """Its owner opens and closes it."""

    def __init__(self, members: Members, planner: Planner, texts: Texts) -> None:
        self._members = members
        self._planner = planner
        self._texts = texts
        self._endpoint: Endpoint | None = None

    async def open(self, bus: Bus, record: ServiceRecord) -> None:
        """Raises `BusError`."""
        subject = subjects.conductor("keys")
        counted = record.add_endpoint("keys", subject, QUEUE_GROUP)
        self._endpoint = await serve(
            bus, subject, PromptKeys, self.keys, queue=QUEUE_GROUP, concurrency=_AT_ONCE, record=counted
        )

    async def close(self) -> None:
        """Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.unsubscribe()

    async def keys(self, message: PromptKeys, envelope: Envelope) -> PromptChunks:
        card = self._card(message)
        body = RequestSubmitted(tokens=message.tokens, prompt=message.prompt, messages=message.messages)
        tokens = await self._texts.tokens(body, card.name)
        if isinstance(tokens, Error):
            raise RemoteError(tokens)
        try:
            keys = chunk_keys(self._planner.root(card, message.tenant), tokens, card.chunk_tokens)
        except ValueError as error:
            raise RemoteError(Error(code=ErrorCode.INVALID_REQUEST, message=str(error))) from error
        return PromptChunks(
            model=card.name,
            tenant=message.tenant,
            num_tokens=len(tokens),
            chunk_tokens=card.chunk_tokens,
            keys=tuple(keys),
        )

    def _card(self, message: PromptKeys) -> ModelCard:
        """Of the served model that is meant. Raises `RemoteError`."""
        cards = {worker.card.name: worker.card for worker in self._members.cluster().workers}
        if message.model is None and len(cards) == 1:
            return next(iter(cards.values()))
        if message.model in cards:
            return cards[message.model]
        if not cards:
            raise RemoteError(Error(code=ErrorCode.NO_WORKERS, message="no worker serves any model now"))
        served = ", ".join(sorted(cards))
        what = "say which model" if message.model is None else f"model {message.model!r} isn't served"
        raise RemoteError(Error(code=ErrorCode.MODEL_NOT_FOUND, message=f"{what}: there is {served}"))
