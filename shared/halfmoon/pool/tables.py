"""The tables behind an arena's slots: what its owner says of slots and leases to those who map it.

    | generations: n u64 | readable bytes: n u64 | unlisted leases: u64 | 0 | leases: buckets of 16 × (token, expiry) |

All words are native 64-bit ones, each written and read at once. One process writes, its kv-tier; any number read.

A reader of shared memory asks here, before it copies and again afterwards, whether the lease that it names is live, and
whether the slot still holds what was leased. A lease's token is a hash of its id; its bucket follows from the token. A
lease whose bucket is full is unlisted: readers learn how many those are, and that they can't be told apart from none.
"""

import functools
import hashlib
from collections.abc import Iterator

from halfmoon.schemas.ids import LeaseId

_WORD_BYTES = 8
_WAYS = 16
_NUM_BUCKETS = 256


def table_bytes(num_slots: int) -> int:
    """Size of the tables of an arena of this many slots, not padded."""
    return (2 * num_slots + 2 + 2 * _NUM_BUCKETS * _WAYS) * _WORD_BYTES


class ArenaTables:
    """A view of the tables. Writing needs a writable view, and is for the owner alone; it isn't thread-safe.

    Raises ValueError for a slot that isn't there, and after `release`.
    """

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        """`memory`: at least `table_bytes(num_slots)` bytes, aligned to words. It is this object's from now on."""
        self._num_slots = num_slots
        with memory, memory[: table_bytes(num_slots)] as tables:
            self._words = tables.cast("Q")
        self._first_bucket = 2 * num_slots + 2
        self._unlisted: set[LeaseId] = set()

    def release(self) -> None:
        """Let go of the memory. Idempotent."""
        self._words.release()

    def generation(self, slot: int) -> int:
        return self._words[self._checked(slot)]

    def set_generation(self, slot: int, generation: int) -> None:
        self._words[self._checked(slot)] = generation

    def readable_bytes(self, slot: int) -> int:
        """Length of the payload that leases hold here; 0 where none does, or it is still being written."""
        return self._words[self._num_slots + self._checked(slot)]

    def set_readable_bytes(self, slot: int, num_bytes: int) -> None:
        self._words[self._num_slots + self._checked(slot)] = num_bytes

    def lease_expires_ns(self, lease_id: LeaseId) -> int | None:
        """Unix time at which a listed lease ends; None for one that isn't listed."""
        token = _token(lease_id)
        for place in self._places(token):
            if self._words[place] == token:
                expires_ns = self._words[place + 1]
                if self._words[place] == token:
                    return expires_ns
        return None

    @property
    def num_unlisted_leases(self) -> int:
        """Live leases that found no room in the table."""
        return self._words[2 * self._num_slots]

    def set_lease(self, lease_id: LeaseId, expires_ns: int | None) -> None:
        """List a lease, move its expiry, or (None) take it out."""
        token = _token(lease_id)
        free: int | None = None
        for place in self._places(token):
            found = self._words[place]
            if found == token:
                if expires_ns is None:
                    self._words[place] = 0
                else:
                    self._words[place + 1] = expires_ns
                return
            if found == 0 and free is None:
                free = place
        if expires_ns is None:
            self._unlisted.discard(lease_id)
        elif free is not None:
            self._words[free + 1] = expires_ns
            self._words[free] = token  # Last: who finds the token finds its expiry.
            self._unlisted.discard(lease_id)
        else:
            self._unlisted.add(lease_id)
        self._words[2 * self._num_slots] = len(self._unlisted)

    def _places(self, token: int) -> Iterator[int]:
        bucket = self._first_bucket + ((token >> 1) % _NUM_BUCKETS) * 2 * _WAYS
        return iter(range(bucket, bucket + 2 * _WAYS, 2))

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self._num_slots:
            raise ValueError(f"slot {slot} of an arena of {self._num_slots}")
        return slot


@functools.lru_cache(maxsize=1024)
def _token(lease_id: LeaseId) -> int:
    """A hash that is the same in every process, and never 0."""
    return int.from_bytes(hashlib.blake2b(lease_id.encode(), digest_size=8).digest(), "little") | 1
