"""What is to be kept, and what is, whatever comes and goes: pins over a table of slots, against a plain set."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from halfmoon.kv_tier.pins import Pins
from halfmoon.kv_tier.slot import Slot
from halfmoon.kv_tier.slots import SlotTable
from halfmoon.kv_tier.state import SlotState
from halfmoon.schemas.chunks import ChunkMeta
from halfmoon.schemas.ids import ChunkKey, RequestId

NUM_SLOTS, MAX_PINNED = 6, 3
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(8)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


class PinsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.slots = SlotTable(NUM_SLOTS)
        self.pins = Pins(self.slots, MAX_PINNED)
        self.wanted: set[ChunkKey] = set()

    def registered(self) -> dict[ChunkKey, Slot]:
        return {slot.key: slot for slot in self.slots.registered() if slot.key is not None}

    @rule(key=st.sampled_from(KEYS), is_held=st.booleans())
    def comes(self, key: ChunkKey, is_held: bool) -> None:
        slot = self.slots.reserve(key, 1, 0)
        if slot is None:
            return
        meta = ChunkMeta(
            key=key, index=0, num_tokens=1, num_bytes=1, checksum=b"", request_id=RequestId("r"), created_ns=0
        )
        if self.slots.commit(slot, meta, register=True, now_ns=0):
            self.pins.came([key])
        if not is_held:
            self.slots.release(slot, 0)

    @rule(is_damaged=st.booleans(), data=st.data())
    def goes(self, is_damaged: bool, data: st.DataObject) -> None:
        """Evicted, or withdrawn however it is held; a second copy may take its place."""
        slots = list(self.registered().values() if is_damaged else self.slots.ready())
        if not slots:
            return
        slot = data.draw(st.sampled_from(sorted(slots, key=lambda each: each.number)))
        gone = self.slots.withdraw(slot) if is_damaged else self.slots.evict(slot)
        assert gone is not None
        self.pins.went([gone.meta.key])
        if gone.successor is not None:
            self.pins.came([gone.successor.key])

    @rule(data=st.data())
    def lets_go(self, data: st.DataObject) -> None:
        held = [slot for slot in self.slots.readable() if slot.num_leases]
        if held:
            self.slots.release(data.draw(st.sampled_from(held)), 0)

    @rule(keys=some_keys)
    def pin(self, keys: list[ChunkKey]) -> None:
        self.wanted.update(keys)
        held = self.pins.add(keys)
        there = self.registered()
        assert held.num_pinned == sum(key in there and there[key].is_pinned for key in keys)
        assert held.num_absent == sum(key not in there for key in keys)
        assert held.num_pinned + held.num_absent + held.num_refused == len(keys)

    @rule(keys=some_keys)
    def unpin(self, keys: list[ChunkKey]) -> None:
        self.wanted.difference_update(keys)
        self.pins.remove(keys)

    @rule(keys=some_keys)
    def replace(self, keys: list[ChunkKey]) -> None:
        self.wanted = set(keys)
        self.pins.replace(keys)

    @invariant()
    def keeps_what_it_can_and_nothing_else(self) -> None:
        self.slots.check_integrity()
        there = self.registered()
        pinned = {key for key, slot in there.items() if slot.is_pinned}
        due = self.wanted & there.keys()
        assert pinned <= due
        assert len(pinned) == min(len(due), MAX_PINNED) == self.slots.counts().pinned
        assert self.pins.num_refused == len(due) - len(pinned)
        assert {key for key in KEYS if key in self.pins} == self.wanted
        assert not any(slot.state is SlotState.PINNED for slot in self.slots.ready())


PinsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPins = PinsMachine.TestCase
