"""One request's way to its reader: token events, numbered, and at the end exactly one terminal event."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog

from halfmoon.bus.codec import CONTENT_TYPES, encode
from halfmoon.bus.endpoint import acknowledge
from halfmoon.bus.errors import BusDisconnected, BusError
from halfmoon.bus.protocol import Bus
from halfmoon.decode.completion import Piece
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Encoding, Failed, Finished, TokenEvent, TokenLogprob, Tokens
from halfmoon.schemas.wire import HEADER_CONTENT_TYPE

MAX_BATCH_TOKENS = 256
"""Per event, so that one with many logprobs stays far below a broker's limit."""

RETRY_S = 0.05
TERMINAL_GRACE_S = 5.0
"""How long a terminal event is tried for, also where the request's deadline has passed."""


class Outbox:
    """Sends in the background, everything that is ready in one event.

    While the bus is away, up to `max_unsent` tokens are kept; then `put` waits, and with it the generation. Before each
    event `is_held` is asked; once it says no, nothing more is sent, and `on_dropped` is called.
    1. `start`; 2. `put` any number of times; 3. `finish`, once, which ends it.
    """

    def __init__(
        self,
        bus: Bus,
        subject: str,
        *,
        request_id: RequestId,
        encoding: Encoding,
        headers: Mapping[str, str],
        first_seq: int,
        max_unsent: int,
        max_batch: int = MAX_BATCH_TOKENS,
        deadline_ns: int,
        receipt: str | None = None,
        is_held: Callable[[], Awaitable[bool]],
        on_dropped: Callable[[], object],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._request_id = request_id
        self._encoding = encoding
        self._headers = {**headers, HEADER_CONTENT_TYPE: CONTENT_TYPES[encoding]}
        self._max_unsent = max_unsent
        self._max_batch = max_batch
        self._deadline_ns = deadline_ns
        self._receipt = receipt
        self._is_held = is_held
        self._on_dropped = on_dropped
        self._log = log
        self.is_dropped = False
        """The reader hears the rest from another worker."""
        self._unsent: deque[Piece] = deque()
        self._terminal: Finished | Failed | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._first_seq = first_seq
        self._sender: asyncio.Task[None] | None = None
        self.sent: list[int] = []
        """Tokens that were published, without those that were known before."""

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def start(self) -> None:
        self._sender = asyncio.create_task(self._send(), name=f"outbox {self._request_id}")

    async def put(self, piece: Piece) -> None:
        """Send this token, soon. Waits where too many are unsent: the caller bounds that by the deadline."""
        await self._room.wait()
        if self.is_dropped:
            return
        self._unsent.append(piece)
        if len(self._unsent) >= self._max_unsent:
            self._room.clear()
        self._changed.set()

    async def finish(self, event: Finished | Failed) -> bool:
        """Send what is left, then this. False where the reader could not be told in time, or not by this worker."""
        if self._terminal is not None:
            raise ValueError(f"request {self._request_id} has ended already")
        if self._sender is None:
            self.start()
        self._terminal = event
        self._changed.set()
        sender = self._sender
        if sender is None:
            return False
        left_s = max(0.0, (self._deadline_ns - time.time_ns()) / 1e9) + TERMINAL_GRACE_S
        done, _ = await asyncio.wait([sender], timeout=left_s)
        if not done:
            sender.cancel()
            await asyncio.wait([sender])
            self._log.error("terminal event not delivered: NATS is away", unsent_tokens=len(self._unsent))
            return False
        if (error := sender.exception()) is not None:
            self._log.error("terminal event not delivered", error=str(error))
            return False
        return not self.is_dropped

    async def _send(self) -> None:
        while not self.is_dropped:
            await self._changed.wait()
            self._changed.clear()
            while self._unsent:
                await self._send_batch()
            if self._terminal is not None and not self.is_dropped:
                if await self._publish(self._terminal) and self._receipt is not None:
                    # The conductor does the same when it hears of the end; this is for the case that it doesn't.
                    with suppress(BusError):
                        await acknowledge(self._bus, self._receipt)
                return

    def _drop(self) -> None:
        self.is_dropped = True
        self._unsent.clear()
        self._room.set()
        self._on_dropped()

    async def _send_batch(self) -> None:
        batch = [self._unsent[place] for place in range(min(len(self._unsent), self._max_batch))]
        logprobs: list[TokenLogprob] = [piece.logprob for piece in batch if piece.logprob is not None]
        is_sent = await self._publish(
            Tokens(
                request_id=self._request_id,
                seq=self._first_seq + len(self.sent),
                tokens=tuple(piece.token for piece in batch),
                text="".join(piece.text for piece in batch),
                logprobs=tuple(logprobs) if len(logprobs) == len(batch) else None,
            )
        )
        if not is_sent:
            return
        for piece in batch:
            self._unsent.popleft()
            self.sent.append(piece.token)
        if len(self._unsent) < self._max_unsent:
            self._room.set()

    async def _publish(self, event: TokenEvent) -> bool:
        """Until the bus has taken it; whoever waits for the sender has the deadline. False: it isn't ours to say."""
        data = encode(event, self._encoding)
        while True:
            if self._bus.is_connected:
                if not await self._is_held():
                    self._drop()
                    return False
                try:
                    await self._bus.publish(self._subject, data, headers=self._headers)
                except BusDisconnected:
                    pass
                else:
                    return True
            await asyncio.sleep(RETRY_S)
