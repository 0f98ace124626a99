"""Streams in memory, with JetStream's semantics: retention, duplicates, work shared and redelivered, followers.

Nothing here waits: what is due later is found by `tick`, which the broker calls when `next_due` has come.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon.bus.errors import BusError, StreamFull, StreamGap
from halfmoon.bus.matching import matches
from halfmoon.bus.protocol import BusMessage, Retention, Settlement, StreamSpec


@dataclass(frozen=True, slots=True)
class Stored:
    message: BusMessage
    stored_at: float


@dataclass(eq=False, slots=True)
class Member:
    """One process's share of a durable consumer."""

    room: Callable[[], int]
    accept: Callable[[int, int, BusMessage], None]
    """Gets the sequence, the number of times it was delivered, and the message."""


@dataclass(eq=False, slots=True)
class Consumer:
    """A durable consumer: who holds which message until when, and what is to be delivered next."""

    name: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    max_deliver: int
    members: list[Member] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    """Heap of sequences that can go out now."""
    delayed: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (time, sequence) that were given back with a delay."""
    outstanding: dict[int, float] = field(default_factory=dict)
    """Sequence to the time at which it is taken back."""
    num_delivered: dict[int, int] = field(default_factory=dict)
    next_member: int = 0

    def add(self, seq: int, subject: str) -> None:
        if matches(self.filter_subject, subject):
            heapq.heappush(self.ready, seq)

    def take_back(self, now: float) -> None:
        for seq in [seq for seq, due in self.outstanding.items() if due <= now]:
            del self.outstanding[seq]
            heapq.heappush(self.ready, seq)
        while self.delayed and self.delayed[0][0] <= now:
            heapq.heappush(self.ready, heapq.heappop(self.delayed)[1])

    def next_due(self) -> float | None:
        dues = list(self.outstanding.values()) + [due for due, _ in self.delayed[:1]]
        return min(dues, default=None)

    def choose_member(self) -> Member | None:
        for step in range(len(self.members)):
            member = self.members[(self.next_member + step) % len(self.members)]
            if member.room() > 0:
                self.next_member = (self.next_member + step + 1) % len(self.members)
                return member
        return None


class MemoryStream:
    def __init__(self, spec: StreamSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self._clock = clock
        self._stored: dict[int, Stored] = {}
        self._num_bytes = 0
        self._ids: dict[str, tuple[int, float]] = {}
        self.last_seq = 0
        self.consumers: dict[str, Consumer] = {}
        self.listeners: set[Callable[[], None]] = set()
        """Followers, told when something may have changed."""

    @property
    def first_seq(self) -> int:
        """Of the messages that it holds; one after the last where it holds none."""
        return next(iter(self._stored), self.last_seq + 1)

    def captures(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.spec.subjects)

    def store(self, message: BusMessage, msg_id: str | None) -> tuple[int, bool]:
        """Sequence, and whether it is a duplicate's. Raises `StreamFull`."""
        now = self._clock()
        self._forget_old(now)
        if msg_id is not None and msg_id in self._ids:
            return self._ids[msg_id][0], True
        num_bytes = len(message.data)
        limit = self.spec.max_bytes
        if limit >= 0 and self._num_bytes + num_bytes > limit:
            if self.spec.retention is Retention.WORK_QUEUE:
                raise StreamFull(f"the stream {self.spec.name!r} is full ({limit:,} bytes); try again later")
            while self._stored and self._num_bytes + num_bytes > limit:
                self._remove(self.first_seq)
        self.last_seq += 1
        self._stored[self.last_seq] = Stored(message, now)
        self._num_bytes += num_bytes
        if msg_id is not None:
            self._ids[msg_id] = (self.last_seq, now)
        for consumer in self.consumers.values():
            consumer.add(self.last_seq, message.subject)
        self.pump()
        return self.last_seq, False

    def get(self, seq: int) -> BusMessage | None:
        stored = self._stored.get(seq)
        return stored.message if stored is not None else None

    def check_reach(self, needed_seq: int) -> None:
        """Raises `StreamGap` unless it has `needed_seq`, or will have it next."""
        self._forget_old(self._clock())
        if not self.first_seq <= needed_seq <= self.last_seq + 1:
            raise StreamGap(self.spec.name, needed_seq, self.first_seq, self.last_seq)

    def consumer(
        self, name: str, filter_subject: str, *, ack_wait_s: float, max_ack_pending: int, max_deliver: int
    ) -> Consumer:
        """The durable consumer of this name, brought to these settings. Raises `BusError` where two would overlap."""
        found = self.consumers.get(name)
        if found is None:
            if self.spec.retention is Retention.WORK_QUEUE and any(
                other.filter_subject == filter_subject for other in self.consumers.values()
            ):
                raise BusError(f"the work queue {self.spec.name!r} already has a consumer for {filter_subject!r}")
            found = Consumer(name, filter_subject, ack_wait_s, max_ack_pending, max_deliver)
            for seq, stored in self._stored.items():
                found.add(seq, stored.message.subject)
            self.consumers[name] = found
        found.ack_wait_s, found.max_ack_pending, found.max_deliver = ack_wait_s, max_ack_pending, max_deliver
        return found

    def settle(self, consumer: Consumer, seq: int, settlement: Settlement, delay_s: float) -> None:
        """What a member says about a message; heeded also when another has it by now, as JetStream does."""
        now = self._clock()
        match settlement:
            case Settlement.IN_PROGRESS:
                if seq in consumer.outstanding:
                    consumer.outstanding[seq] = now + consumer.ack_wait_s
            case Settlement.NAK:
                if consumer.outstanding.pop(seq, None) is not None:
                    heapq.heappush(consumer.delayed, (now + delay_s, seq))
            case Settlement.ACK | Settlement.TERM:
                consumer.outstanding.pop(seq, None)
                consumer.num_delivered.pop(seq, None)
                if self.spec.retention is Retention.WORK_QUEUE:
                    self._remove(seq)
        self.pump()

    def pump(self) -> None:
        """Deliver all that can be delivered now."""
        now = self._clock()
        for consumer in self.consumers.values():
            consumer.take_back(now)
            while consumer.ready and len(consumer.outstanding) < consumer.max_ack_pending:
                seq = consumer.ready[0]
                message = self.get(seq)
                times = consumer.num_delivered.get(seq, 0)
                if message is None or 0 < consumer.max_deliver <= times:
                    heapq.heappop(consumer.ready)
                    continue
                member = consumer.choose_member()
                if member is None:
                    break
                heapq.heappop(consumer.ready)
                consumer.num_delivered[seq] = times + 1
                consumer.outstanding[seq] = now + consumer.ack_wait_s
                member.accept(seq, times + 1, message)
        for listener in list(self.listeners):
            listener()

    def tick(self) -> None:
        self._forget_old(self._clock())
        self.pump()

    def next_due(self) -> float | None:
        dues = [due for consumer in self.consumers.values() if (due := consumer.next_due()) is not None]
        if self.spec.max_age_s and self._stored:
            dues.append(next(iter(self._stored.values())).stored_at + self.spec.max_age_s)
        return min(dues, default=None)

    def _forget_old(self, now: float) -> None:
        # Both are in the order of time, so the old ones are in front.
        while self._ids:
            key, (_, at) = next(iter(self._ids.items()))
            if now - at < self.spec.duplicate_window_s:
                break
            del self._ids[key]
        while self.spec.max_age_s and self._stored:
            seq, stored = next(iter(self._stored.items()))
            if now - stored.stored_at < self.spec.max_age_s:
                break
            self._remove(seq)

    def _remove(self, seq: int) -> None:
        removed = self._stored.pop(seq, None)
        if removed is not None:
            self._num_bytes -= len(removed.message.data)
