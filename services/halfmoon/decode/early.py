"""Announcements that come before their half: conductor and prefill speak to a decode worker on two ways. Pure."""

from dataclasses import dataclass, field

from halfmoon.schemas.ids import TransferId
from halfmoon.schemas.splits import KvFailed, KvReady


@dataclass(slots=True)
class _Entry:
    since_s: float
    num_chunks: int = 0
    messages: list[KvReady | KvFailed] = field(default_factory=list)


class EarlyBuffer:
    """Keeps them by transfer: at most so many transfers, each for so long. The oldest goes first."""

    def __init__(self, *, max_transfers: int, ttl_s: float, max_chunks: int = 8192) -> None:
        self._entries: dict[TransferId, _Entry] = {}
        self._max_transfers = max_transfers
        self._max_chunks = max_chunks
        self._ttl_s = ttl_s
        self.dropped = 0
        """Transfers whose announcements were thrown away."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, message: KvReady | KvFailed, now_s: float) -> list[KvReady | KvFailed]:
        """Keep it; returns what had to go for it, or had expired."""
        entry = self._entries.setdefault(message.transfer_id, _Entry(now_s))
        entry.messages.append(message)
        entry.num_chunks += max(1, len(message.chunks)) if isinstance(message, KvReady) else 1
        gone = self.expire(now_s)
        if entry.num_chunks > self._max_chunks:
            gone += self._drop(message.transfer_id)
        while len(self._entries) > self._max_transfers:
            gone += self._drop(next(iter(self._entries)))
        return gone

    def take(self, transfer_id: TransferId) -> list[KvReady | KvFailed]:
        """What has come for this transfer, in order; it is not kept any longer."""
        entry = self._entries.pop(transfer_id, None)
        return entry.messages if entry is not None else []

    def expire(self, now_s: float) -> list[KvReady | KvFailed]:
        """What has waited too long."""
        gone: list[KvReady | KvFailed] = []
        for transfer_id, entry in list(self._entries.items()):
            if now_s - entry.since_s <= self._ttl_s:
                break
            gone += self._drop(transfer_id)
        return gone

    def _drop(self, transfer_id: TransferId) -> list[KvReady | KvFailed]:
        self.dropped += 1
        return self.take(transfer_id)
