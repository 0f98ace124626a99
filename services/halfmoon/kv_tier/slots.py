"""The table of slots: state, generation, what each holds, and the index from key to slot. Pure; times are passed in."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.state import SlotEvent, SlotState
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """`free + staged + ready + leased + pinned = total`, always. A pinned slot that is leased too is in `pinned`."""

    total: int
    free: int
    staged: int
    ready: int
    leased: int
    pinned: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A registered chunk that is gone, and the copy of it that is registered in its place."""

    meta: ChunkMeta
    successor: ChunkMeta | None = None


class SlotTable:
    """All slots of an arena.

    The index holds one slot per key. A registered copy displaces an unregistered one (a working copy that somebody
    pulled) and is displaced by nothing; a slot that isn't in the index lives until its leases go. Among those are the
    spares: copies that were to be registered and came second. When the registered one goes, the oldest spare is.
    """

    def __init__(
        self,
        num_slots: int,
        publish_generation: Callable[[int, int], None] | None = None,
        first_generation: int = 1,
        publish_readable: Callable[[int, int], None] | None = None,
        book: TierBook | None = None,
    ) -> None:
        """`publish_generation(slot, generation)` is told each slot's generation, now and whenever it rises.
        `publish_readable(slot, num_bytes)` is told the length of the payload that readers hold there; 0 when none does.

        `book` counts what is registered, by tenant, and what is beyond a tenant's quota isn't.

        A pool begins at its epoch, so that no generation of one life is ever met again in the next.
        """
        self._publish = publish_generation
        self._publish_readable = publish_readable
        self._book = book
        self._slots = [Slot(number, first_generation) for number in range(num_slots)]
        self._free = deque(range(num_slots))
        self._index: dict[ChunkKey, int] = {}
        self._spares: dict[ChunkKey, list[int]] = {}
        """Leased slots of a registered key, in the order of their commits; no empty lists."""
        self._ready: dict[int, None] = {}
        self._num_staged = 0
        self._num_leased = 0
        self._num_pinned = 0
        self._num_registered = 0
        for slot in self._slots:
            self._announce(slot)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        """The slot of this number. Raises IndexError."""
        if number < 0:
            raise IndexError(number)
        return self._slots[number]

    def find(self, key: ChunkKey) -> Slot | None:
        """The readable slot that holds this chunk."""
        number = self._index.get(key)
        return None if number is None else self._slots[number]

    def is_registered(self, key: ChunkKey) -> bool:
        """Whether one of its copies here is announced."""
        slot = self.find(key)
        return slot is not None and slot.registered

    def ready(self) -> Iterator[Slot]:
        """Those that eviction may take, the longest unused first."""
        return (self._slots[number] for number in self._ready)

    def readable(self) -> Iterator[Slot]:
        """All that hold a chunk, whether it can be found or only those who hold it know of it."""
        return (slot for slot in self._slots if slot.readable)

    def registered(self) -> Iterator[Slot]:
        """The registered chunks."""
        return (slot for number in self._index.values() if (slot := self._slots[number]).registered)

    @property
    def num_registered(self) -> int:
        return self._num_registered

    def counts(self) -> SlotCounts:
        return SlotCounts(
            total=len(self._slots),
            free=len(self._free),
            staged=self._num_staged,
            ready=len(self._ready),
            leased=self._num_leased,
            pinned=self._num_pinned,
        )

    def reserve(self, key: ChunkKey, num_bytes: int, now_ns: int) -> Slot | None:
        """A free slot, staged for this chunk; None where there is none."""
        if not self._free:
            return None
        slot = self._slots[self._free.popleft()]
        slot.machine.fire(SlotEvent.RESERVE)
        slot.key, slot.num_bytes, slot.last_access_ns = key, num_bytes, now_ns
        slot.num_leases = 1
        self._num_staged += 1
        return slot

    def commit(self, slot: Slot, meta: ChunkMeta, *, register: bool, now_ns: int) -> bool:
        """Make a staged slot readable, leased to its writer. True when it is now the registered copy of its key."""
        slot.machine.fire(SlotEvent.COMMIT)
        slot.machine.fire(SlotEvent.LEASE)
        self._num_staged -= 1
        self._num_leased += 1
        slot.meta, slot.num_bytes, slot.last_access_ns = meta, meta.num_bytes, now_ns
        self._announce_readable(slot, meta.num_bytes)
        holder = self.find(meta.key)
        if register and holder is not None and holder.registered:
            self._spares.setdefault(meta.key, []).append(slot.number)
        elif not (register and self._register(slot, meta)) and holder is None:
            self._index[meta.key] = slot.number
        return slot.registered

    def register(self, slot: Slot) -> bool:
        """Keep a working copy, which is the one that its key finds; False where its tenant's quota has no room for it.

        Raises ValueError for any other slot.
        """
        if slot.meta is None or slot.registered or self.find(slot.meta.key) is not slot:
            raise ValueError(f"slot {slot.number} holds no working copy that could be registered")
        return self._register(slot, slot.meta)

    def lease(self, slot: Slot, now_ns: int, *, is_use: bool = True) -> None:
        """One more reader; or, where that is no use of the chunk, one who looks after it."""
        was_ready = slot.state is SlotState.READY
        slot.machine.fire(SlotEvent.LEASE)
        if was_ready:
            del self._ready[slot.number]
            self._num_leased += 1
        if slot.num_leases == 0:
            self._announce_readable(slot, slot.num_bytes)
        slot.num_leases += 1
        if is_use:
            slot.hits += 1
            slot.last_access_ns = now_ns

    def release(self, slot: Slot, now_ns: int) -> None:
        """One lease fewer. A staged slot, and an unregistered one with its last lease, becomes free."""
        if slot.state is SlotState.STAGED:
            slot.machine.fire(SlotEvent.ABANDON)
            self._num_staged -= 1
            self._reset(slot)
            return
        if slot.num_leases > 1:
            slot.machine.fire(SlotEvent.RELEASE)
            slot.num_leases -= 1
            return
        slot.machine.fire(SlotEvent.RELEASE_LAST)
        slot.num_leases = 0
        slot.last_access_ns = now_ns
        self._announce_readable(slot, 0)
        if slot.state is SlotState.PINNED:
            return
        self._num_leased -= 1
        if slot.registered:
            self._ready[slot.number] = None
        else:
            slot.machine.fire(SlotEvent.DISCARD)
            self._reset(slot)

    def pin(self, slot: Slot) -> bool:
        """Keep a registered slot until `unpin`; False where it is kept already, or isn't registered."""
        if not slot.registered or slot.state is SlotState.PINNED:
            return False
        if slot.state is SlotState.READY:
            del self._ready[slot.number]
        else:
            self._num_leased -= 1
        slot.machine.fire(SlotEvent.PIN)
        self._num_pinned += 1
        return True

    def unpin(self, slot: Slot) -> bool:
        """Let eviction take this slot again, as the latest used; False where it isn't pinned."""
        if slot.state is not SlotState.PINNED:
            return False
        slot.machine.fire(SlotEvent.UNPIN_LEASED if slot.num_leases else SlotEvent.UNPIN)
        self._num_pinned -= 1
        if slot.num_leases:
            self._num_leased += 1
        else:
            self._ready[slot.number] = None
        return True

    def evict(self, slot: Slot) -> Evicted:
        """Free a ready slot. Raises `IllegalTransition` for any other."""
        slot.machine.fire(SlotEvent.EVICT)
        meta = slot.meta
        assert meta is not None
        del self._ready[slot.number]
        self._reset(slot)
        return Evicted(meta, self._promote(meta.key))

    def withdraw(self, slot: Slot) -> Evicted | None:
        """Let nobody find this readable slot any more, pinned or not; those who hold it keep it.

        None where it wasn't registered.
        """
        self.unpin(slot)
        if slot.state is SlotState.READY:
            return self.evict(slot)
        meta = slot.meta
        assert meta is not None
        was_registered = slot.registered
        self._unlist(slot)
        return Evicted(meta, self._promote(meta.key)) if was_registered else None

    def check_integrity(self) -> None:
        """Raises AssertionError where the table contradicts itself."""
        by_state = {state: [slot for slot in self._slots if slot.state is state] for state in SlotState}
        counts = self.counts()
        assert counts.free == len(by_state[SlotState.FREE]) == len(set(self._free)), counts
        assert counts.staged == len(by_state[SlotState.STAGED]), counts
        assert counts.ready == len(by_state[SlotState.READY]), counts
        assert counts.leased == len(by_state[SlotState.LEASED]), counts
        assert counts.pinned == len(by_state[SlotState.PINNED]), counts
        assert counts.free + counts.staged + counts.ready + counts.leased + counts.pinned == counts.total, counts
        assert set(self._free) == {slot.number for slot in by_state[SlotState.FREE]}
        assert set(self._ready) == {slot.number for slot in by_state[SlotState.READY]}
        for slot in by_state[SlotState.FREE]:
            assert (slot.num_leases, slot.key, slot.meta, slot.registered) == (0, None, None, False), slot
        for slot in by_state[SlotState.STAGED]:
            assert (slot.num_leases, slot.meta, slot.registered) == (1, None, False), slot
        for slot in by_state[SlotState.READY]:
            assert (slot.num_leases, slot.registered) == (0, True), slot
        for slot in by_state[SlotState.LEASED]:
            assert slot.num_leases >= 1, slot
        for slot in by_state[SlotState.PINNED]:
            assert slot.registered, slot
        for key, number in self._index.items():
            slot = self._slots[number]
            assert slot.readable, slot
            assert slot.meta is not None, slot
            assert slot.key == slot.meta.key == key, slot
        for key, numbers in self._spares.items():
            assert numbers, key
            assert self._slots[self._index[key]].registered, key
            for slot in (self._slots[number] for number in numbers):
                assert (slot.state, slot.key, slot.registered) == (SlotState.LEASED, key, False), slot
        registered = [slot for slot in self._slots if slot.registered]
        assert all(slot.key is not None and self._index.get(slot.key) == slot.number for slot in registered)
        assert len(registered) == self._num_registered
        if self._book is not None:
            self._book.check(slot.meta for slot in registered if slot.meta is not None)

    def _promote(self, key: ChunkKey) -> ChunkMeta | None:
        """Register the oldest spare of a key that has no registered copy any more, within its tenant's quota."""
        numbers = self._spares.pop(key, [])
        for number in numbers:
            slot = self._slots[number]
            assert slot.meta is not None
            if self._register(slot, slot.meta):
                if len(numbers) > 1:
                    self._spares[key] = [other for other in numbers if other != number]
                return slot.meta
        return None

    def _register(self, slot: Slot, meta: ChunkMeta) -> bool:
        """Make it the registered copy of its key; False, and nothing changes, where the quota has no room for it."""
        if self._book is not None and not self._book.admit(meta):
            return False
        self._index[meta.key] = slot.number
        slot.registered = True
        self._num_registered += 1
        return True

    def _unlist(self, slot: Slot) -> None:
        """Take a slot out of index and spares."""
        if slot.key is not None:
            if self._index.get(slot.key) == slot.number:
                del self._index[slot.key]
            numbers = self._spares.get(slot.key, [])
            if slot.number in numbers:
                numbers.remove(slot.number)
                if not numbers:
                    del self._spares[slot.key]
        if slot.registered and self._book is not None and slot.meta is not None:
            self._book.discharge(slot.meta)
        self._num_registered -= slot.registered
        slot.registered = False

    def _reset(self, slot: Slot) -> None:
        self._unlist(slot)
        slot.key, slot.meta, slot.traceparent = None, None, None
        slot.num_bytes = slot.num_leases = slot.hits = 0
        slot.generation += 1
        self._free.append(slot.number)
        self._announce(slot)

    def _announce(self, slot: Slot) -> None:
        if self._publish is not None:
            self._publish(slot.number, slot.generation)

    def _announce_readable(self, slot: Slot, num_bytes: int) -> None:
        if self._publish_readable is not None:
            self._publish_readable(slot.number, num_bytes)
