"""A decode worker whose requests may have gone on elsewhere, and one that is asked what it has ended."""

from pathlib import Path

import pytest

from halfmoon.bus.endpoint import Envelope, announce, serve
from halfmoon.decode import standing
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import HalfClaim, HalfClaimed, RequestRecall, Role
from support.exact_engine import CHUNK_TOKENS, reference
from support.wait import until
from support.workers import CONDUCTOR, SEED, cluster, prompt


@pytest.fixture
def always_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were cut off again and again."""
    monkeypatch.setattr(standing, "DOUBT_AFTER_S", -1.0)
    monkeypatch.setattr(standing, "HEARTBEAT_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("always_doubtful")
async def test_what_goes_on_elsewhere_ends_without_a_word_and_leaves_nothing(tmp_path: Path) -> None:
    asked: list[HalfClaim] = []

    async def judge(claim: HalfClaim, envelope: Envelope) -> HalfClaimed:
        asked.append(claim)
        return HalfClaimed(is_held=claim.request_id != "req-2")

    async with cluster(tmp_path) as pair:
        await serve(pair.bus, subjects.CLAIM, HalfClaim, judge)
        tokens = prompt(CHUNK_TOKENS + 5)
        _, _, ours = await pair.submit(tokens, sampling=Sampling(max_tokens=40))
        await ours.finished()
        _, half, other = await pair.submit(tokens, sampling=Sampling(max_tokens=40))
        await until(lambda: any(claim.request_id == half.request_id for claim in asked))
        await pair.idle()
        assert ours.tokens == reference(tokens, 40, SEED)
        assert len(ours.terminals) == 1
        assert other.terminals == []
        assert other.tokens == reference(tokens, 40, SEED)[: len(other.tokens)]
        # Who dropped it has nothing to tell the conductor either: whoever goes on will.
        assert [ended.request_id for ended in pair.ended_of(Role.DECODE)] == ["req-1"]
        assert pair.failures == []


async def test_what_was_ended_here_is_told_again_to_who_asks(tmp_path: Path) -> None:
    async with cluster(tmp_path) as pair:
        _, half, reader = await pair.submit(prompt(CHUNK_TOKENS + 5))
        await reader.finished()
        await until(lambda: pair.ended_of(Role.DECODE))
        for request_id in (RequestId("req-unknown"), half.request_id):
            await announce(pair.bus, subjects.RECALL, RequestRecall(request_id=request_id, conductor=CONDUCTOR))
        await until(lambda: len(pair.ended_of(Role.DECODE)) == 2)
        first, again = pair.ended_of(Role.DECODE)
        assert first == again
        assert len(reader.terminals) == 1
