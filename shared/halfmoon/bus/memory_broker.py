"""What the buses of one process share: who listens where, and the streams."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from halfmoon.bus import matching
from halfmoon.bus.errors import BusError, NoStream, StreamFull
from halfmoon.bus.memory_stream import Consumer, MemoryStream
from halfmoon.bus.micro import MicroService
from halfmoon.bus.protocol import BusMessage, Settlement, StreamSpec

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
_RECEIPT = "$JS.ACK"


class Receipt(msgspec.Struct, omit_defaults=True):
    """What a stream answers to whoever published to it."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: str | None = None


@dataclass(eq=False, slots=True)
class Interest:
    pattern: str
    queue: str | None
    deliver: Callable[[BusMessage], None]


class MemoryBroker:
    """What the buses of one process share.

    Time is the event loop's, unless a `clock` (seconds, never going back) is given; then whoever moves it calls `tick`.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.services: list[MicroService] = []
        self._clock = clock
        self._interests: list[Interest] = []
        self._answers: dict[str, asyncio.Future[BusMessage]] = {}
        self._streams: dict[str, MemoryStream] = {}
        self._turns: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def tick(self) -> None:
        """Do what is due: redeliver what wasn't settled in time, forget what is too old."""
        for stream in self._streams.values():
            stream.tick()
        self.arm()

    def arm(self) -> None:
        """Have `tick` called when next something is due; where a clock was given, its owner does that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((at for s in self._streams.values() if (at := s.next_due()) is not None), default=None)
        if due is not None and self._clock is None:
            self._timer = asyncio.get_running_loop().call_at(due, self.tick)

    def attach(self, interest: Interest) -> None:
        self._interests.append(interest)

    def detach(self, interest: Interest) -> None:
        if interest in self._interests:
            self._interests.remove(interest)

    def expect(self, inbox: str) -> asyncio.Future[BusMessage]:
        """The first message on `inbox`. Its caller hands it back with `give_up`."""
        answer: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()
        self._answers[inbox] = answer
        return answer

    def give_up(self, inbox: str) -> None:
        self._answers.pop(inbox, None)

    def receipt(self, stream: MemoryStream, consumer: Consumer, seq: int) -> str:
        """Subject at which a delivery is settled."""
        return f"{_RECEIPT}.{stream.spec.name}.{consumer.name}.{seq}"

    def _acknowledge(self, message: BusMessage) -> None:
        name, durable, seq = message.subject.removeprefix(f"{_RECEIPT}.").split(".")
        stream = self.stream(name)
        stream.settle(stream.consumers[durable], int(seq), Settlement(message.data.decode()), 0.0)
        self.arm()

    def send(self, message: BusMessage, *, msg_id: str | None = None) -> bool:
        """To everybody whom it concerns. False where that is nobody."""
        if message.subject.startswith(_RECEIPT):
            self._acknowledge(message)
            return True
        answer = self._answers.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)
            return True
        groups: dict[str, list[Interest]] = {}
        heard = False
        for interest in list(self._interests):
            if not matching.matches(interest.pattern, message.subject):
                continue
            heard = True
            if interest.queue is None:
                interest.deliver(message)
            else:
                groups.setdefault(interest.queue, []).append(interest)
        for queue, members in groups.items():
            turn = self._turns.get(queue, 0)
            self._turns[queue] = turn + 1
            members[turn % len(members)].deliver(message)
        stream = self.stream_for(message.subject)
        if stream is not None:
            heard = True
            receipt = self._store(stream, message, msg_id)
            if message.reply is not None:
                self.send(BusMessage(message.reply, msgspec.json.encode(receipt)))
        return heard

    def _store(self, stream: MemoryStream, message: BusMessage, msg_id: str | None) -> Receipt:
        bare = BusMessage(message.subject, message.data, message.headers)
        try:
            seq, duplicate = stream.store(bare, msg_id)
        except StreamFull as error:
            return Receipt(error=str(error))
        self.arm()
        return Receipt(stream=stream.spec.name, seq=seq, duplicate=duplicate)

    def stream_for(self, subject: str) -> MemoryStream | None:
        return next((stream for stream in self._streams.values() if stream.captures(subject)), None)

    def stream(self, name: str) -> MemoryStream:
        """Raises `NoStream`."""
        found = self._streams.get(name)
        if found is None:
            raise NoStream(name)
        return found

    def ensure_stream(self, spec: StreamSpec) -> None:
        found = self._streams.get(spec.name)
        if found is None:
            self._streams[spec.name] = MemoryStream(spec, self.now)
        elif found.spec.retention is not spec.retention:
            raise BusError(f"stream {spec.name!r} exists with another retention, which can't be changed")
        else:
            found.spec = spec
