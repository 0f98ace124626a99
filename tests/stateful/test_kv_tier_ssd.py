"""DRAM over an SSD: wherever a chunk is said to be it is, with its own bytes, and nowhere else."""

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from halfmoon.chunks.checksum import checksum
from halfmoon.eviction import PolicyName, make_policy
from halfmoon.kv_tier.events import Announcer, Outbox
from halfmoon.kv_tier.flights import PullRequest
from halfmoon.kv_tier.quotas import TierBook
from halfmoon.kv_tier.ssd.demotion import Demoter
from halfmoon.kv_tier.ssd.directory import SsdDirectory
from halfmoon.kv_tier.ssd.file import file_bytes
from halfmoon.kv_tier.ssd.lower_tier import LowerTier
from halfmoon.kv_tier.ssd.reads import SsdReader
from halfmoon.kv_tier.ssd.reuse import Admission, ReuseMemory, Watermarks
from halfmoon.kv_tier.ssd.store import SsdStore
from halfmoon.kv_tier.store import ChunkStore
from halfmoon.pool.arena import Arena
from halfmoon.schemas.chunks import ChunkEvent, ChunkMeta, ChunkOutcome, ChunkRegistered, EvictReason, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId, WorkerId, new_lease_id
from halfmoon.schemas.kv_tier import WantedChunk, WrittenChunk
from halfmoon.tracing import Context, setup

R = TypeVar("R")
NUM_SLOTS, SLOT_BYTES, NUM_BYTES = 4, 4096, 3000
MAX_FILES = 5
NODE, HOLDER = NodeId("node-a"), WorkerId("worker")
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(9)]
LOG = structlog.stdlib.get_logger("test")
numbers = st.integers(0, len(KEYS) - 1)


async def _published(event: ChunkEvent) -> None:
    raise AssertionError("nothing is published here")


class TiersMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from([PolicyName.LRU, PolicyName.PREFIX_AWARE]))
    def start(self, policy: PolicyName) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.policy = policy
        self.telemetry = setup("kv_tier", exporters={})
        self.life = 0
        self.version: dict[int, int] = {}
        """Of each chunk that was ever written; its bytes are made from it."""
        self.requests = 0
        self.is_damaged: set[int] = set()
        self.open()

    def open(self) -> None:
        """A new life of the pool, on the same directory."""
        self.life += 1
        epoch = time.time_ns()
        root = Path(self.folder.name)
        self.arena = Arena.create(root / f"arena-{self.life}", SLOT_BYTES, NUM_SLOTS)
        self.outbox = Outbox(NODE, epoch)
        announcer = Announcer(self.outbox, _published, lambda error: None)
        tracer = self.telemetry.tracer
        self.store = ChunkStore(self.arena, epoch, announcer, tracer, eviction_policy=self.policy)
        limit_bytes = MAX_FILES * file_bytes(NUM_BYTES)

        async def opened() -> SsdStore:
            ssd = SsdStore(
                SsdDirectory(root / "ssd", SLOT_BYTES),
                lambda: make_policy(self.policy, MAX_FILES, ChunkKey),
                TierBook(Tier.SSD, limit_bytes, {}),
                limit_bytes,
                LOG,
            )
            await ssd.load(None)
            return ssd

        self.ssd = self.run(opened())
        self.lower = LowerTier(self.ssd, ReuseMemory(NUM_SLOTS, Admission.ALL), promote_within=3)
        self.store.attach(self.lower)
        self.demoter = Demoter(self.store, self.lower, holder=HOLDER, fixed=Watermarks(0.6, 0.5))
        self.reader = SsdReader(self.store, self.lower, tracer, LOG, node=NODE, holder=HOLDER)
        self.dram: set[int] = set()
        self.known: dict[ChunkKey, Tier] = {}

    def run(self, work: Coroutine[object, object, R]) -> R:
        return self.loop.run_until_complete(work)

    def next_request(self) -> RequestId:
        self.requests += 1
        return RequestId(f"req-{self.requests}")

    def content(self, number: int) -> bytes:
        return bytes([number, self.version[number] % 256]) * (NUM_BYTES // 2)

    def on_ssd(self) -> set[int]:
        return {KEYS.index(meta.key) for meta in self.ssd.metas()}

    def in_dram(self) -> set[int]:
        return {KEYS.index(slot.key) for slot in self.store.ledger.slots.registered() if slot.key is not None}

    @rule(some=st.lists(numbers, min_size=1, max_size=6))
    def writes(self, some: list[int]) -> None:
        """One after the other, with demotion between them as there is time for it."""
        for at, number in enumerate(some):
            self.write(number)
            if at % 2:
                self.demotes(times=2)

    def write(self, number: int) -> None:
        """Computed again where it is nowhere; the same bytes, as equal keys say."""
        self.version.setdefault(number, len(self.version))
        request_id, lease = self.next_request(), new_lease_id()
        self.store.ledger.open_lease(lease, HOLDER, request_id, 2**62)
        slot = self.store.reserve(lease, KEYS[number], NUM_BYTES)
        assert slot is not None, "no reader holds anything"
        payload = self.store.payload(slot)
        payload[:] = self.content(number)
        meta = ChunkMeta(
            key=KEYS[number],
            index=number,
            num_tokens=1,
            num_bytes=NUM_BYTES,
            checksum=checksum(payload),
            request_id=request_id,
            created_ns=1,
        )
        written = WrittenChunk(slot=slot.number, generation=slot.generation, meta=meta)
        self.store.commit(lease, [written], None)
        self.store.ledger.release(lease, time.time_ns())
        assert number in self.in_dram()

    @rule()
    def has_time(self) -> None:
        self.demotes(times=4)

    def demotes(self, times: int) -> None:
        before = self.in_dram() | self.on_ssd()
        evictions = self.store.counters.evictions
        for _ in range(times):
            self.run(self.demoter.step())
        gone = before - (self.in_dram() | self.on_ssd())
        assert len(gone) == self.store.counters.evictions - evictions, "what is nowhere was evicted from the SSD"

    @rule(number=numbers, direct=st.booleans())
    def reads(self, number: int, direct: bool) -> None:
        key, request_id, lease_id = KEYS[number], self.next_request(), new_lease_id()
        self.lower.asked(request_id, [key], time.time_ns())
        lease = self.store.ledger.open_lease(lease_id, HOLDER, request_id, 2**62)
        slot = self.store.ledger.lease_cached(lease_id, key, time.time_ns())
        assert (slot is not None) == (number in self.in_dram())
        if slot is None and number in self.on_ssd():
            promotions, last = self.lower.promotions, self.ssd.find(key)
            assert last is not None
            is_second = last.read_at is not None and self.lower.reuse.clock - last.read_at <= 3 and not direct
            request = PullRequest(request_id, lease_id, True, time.time_ns() + 10**10, Context())
            wanted = WantedChunk(key=key, index=number, num_tokens=1, num_bytes=NUM_BYTES)
            [answer] = self.run(self.reader.read(request, [wanted], direct=direct))
            if number in self.is_damaged:
                assert (answer.outcome, answer.slot) == (ChunkOutcome.CORRUPT, None)
                assert number not in self.on_ssd()
                self.is_damaged.discard(number)
            else:
                assert answer.outcome is ChunkOutcome.SSD, answer.detail
                assert answer.slot is not None
                slot = self.store.ledger.slots[answer.slot.slot]
                assert self.lower.promotions - promotions == is_second == (number in self.in_dram())
        if slot is not None:
            assert bytes(self.store.payload(slot)) == self.content(number)
            assert slot.number in lease.slots
        self.store.ledger.release(lease_id, time.time_ns())

    @rule(number=numbers)
    def is_damaged_on_the_disk(self, number: int) -> None:
        self.run(self.ssd.settled())
        if number in self.on_ssd():
            path = self.ssd.directory.path_of(KEYS[number])
            content = bytearray(path.read_bytes())
            content[-1] ^= 1 if number not in self.is_damaged else 0
            path.write_bytes(content)
            self.is_damaged.add(number)

    @rule(some=st.sets(numbers, max_size=3))
    def is_flushed(self, some: set[int]) -> None:
        keys = [KEYS[number] for number in some]

        async def removed() -> list[ChunkMeta]:
            return self.ssd.remove(keys)

        gone = self.run(removed())
        slots = [slot for key in keys if (slot := self.store.ledger.slots.find(key)) is not None]
        self.store.withdraw(slots, EvictReason.FLUSH)
        self.store.tell_flushed(meta.key for meta in gone)
        assert not some & (self.in_dram() | self.on_ssd())

    @rule()
    def ends_and_starts_again(self) -> None:
        """As after a kill: nobody is told anything."""
        self.run(self.ssd.settled())
        left = self.on_ssd()
        self.close()
        self.open()
        assert self.on_ssd() == left
        assert self.in_dram() == set()

    def close(self) -> None:
        async def closed() -> None:
            await self.reader.close()
            await self.ssd.close()

        self.run(closed())
        self.arena.close()
        self.arena.unlink()

    @invariant()
    def books_agree_with_each_other_and_with_what_is_told(self) -> None:
        self.store.check_integrity()
        counts = self.store.ledger.slots.counts()
        assert (counts.leased, counts.staged) == (0, 0)
        while (event := self.outbox.next_event()) is not None:
            self.outbox.telling(event)
            self.outbox.told(event)
            if isinstance(event, ChunkRegistered):
                self.known.update({chunk.key: chunk.tier for chunk in event.chunks})
            elif hasattr(event, "keys"):
                for key in event.keys:
                    self.known.pop(key, None)
        expected = {KEYS[number]: Tier.SSD for number in self.on_ssd()}
        expected |= {KEYS[number]: Tier.DRAM for number in self.in_dram()}
        assert self.known == expected
        assert list(self.store.inventory(None, 100)) == sorted(expected)
        assert self.ssd.book.num_bytes <= self.ssd.limit_bytes
        self.is_damaged &= self.on_ssd()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.close()
            self.run(self.telemetry.aclose())
            self.loop.close()
            self.folder.cleanup()


TiersMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestTiers = TiersMachine.TestCase
