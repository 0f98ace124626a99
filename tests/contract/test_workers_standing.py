"""A decode worker whose requests may have gone on elsewhere."""

from pathlib import Path

import pytest

from halfmoon.bus.endpoint import Envelope, serve
from halfmoon.bus.protocol import BusMessage
from halfmoon.decode import standing
from halfmoon.schemas import subjects
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import HalfClaim, HalfClaimed, Role
from support.exact_engine import CHUNK_TOKENS, reference
from support.wait import until
from support.workers import SEED, cluster, prompt


@pytest.fixture
def always_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were cut off again and again."""
    monkeypatch.setattr(standing, "DOUBT_AFTER_S", -1.0)
    monkeypatch.setattr(standing, "HEARTBEAT_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("always_doubtful")
async def test_what_goes_on_elsewhere_ends_without_a_word_and_leaves_nothing(tmp_path: Path) -> None:
    asked: list[HalfClaim] = []
    receipts: list[tuple[str, bytes]] = []

    async def judge(claim: HalfClaim, envelope: Envelope) -> HalfClaimed:
        asked.append(claim)
        return HalfClaimed(is_held=claim.request_id != "req-2")

    async def acknowledged(message: BusMessage) -> None:
        receipts.append((message.subject, message.data))

    async with cluster(tmp_path) as pair:
        await serve(pair.bus, subjects.CLAIM, HalfClaim, judge)
        await pair.bus.subscribe("receipt.*", acknowledged)
        tokens = prompt(CHUNK_TOKENS + 5)
        _, _, ours = await pair.submit(tokens, sampling=Sampling(max_tokens=40))
        await ours.finished()
        await until(lambda: receipts)
        _, half, other = await pair.submit(tokens, sampling=Sampling(max_tokens=40))
        await until(lambda: any(claim.request_id == half.request_id for claim in asked))
        await pair.idle()
        assert ours.tokens == reference(tokens, 40, SEED)
        assert len(ours.terminals) == 1
        assert other.terminals == []
        assert other.tokens == reference(tokens, 40, SEED)[: len(other.tokens)]
        # Who dropped it has nothing to tell the conductor either: whoever goes on will.
        assert [ended.request_id for ended in pair.ended_of(Role.DECODE)] == ["req-1"]
        assert receipts == [("receipt.1", b"+ACK")]
        assert pair.failures == []
