"""Transfers run while the prompt is still being computed: the trace shows it."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.halves import halves
from support.handover import handover_of
from support.system import System

pytestmark = [pytest.mark.timeout(300), pytest.mark.model, pytest.mark.nightly]

CHUNK_TOKENS = 256
PROMPT_TOKENS = 1500
NUM_CHUNKS = 6  # the last is a partial one


@pytest.fixture(params=["auto", "tcp"])
def system(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[System]:
    options = (f"--chunk-tokens={CHUNK_TOKENS}", "--threads=1", "--arena-mib=256", f"--transport={request.param}")
    system = System.start(tmp_path / "data", model, *options)
    yield system
    assert system.stop() == 0


async def test_decode_has_all_but_the_last_chunk_when_prefill_ends(system: System) -> None:
    generator = random.Random(1500)
    prompt = [generator.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
    async with halves(system.nats_url) as driver:
        outcome = await driver.send(prompt, prefill="prefill-1", decode="decode-1", max_tokens=2)
    assert outcome.terminal is not None
    assert len(outcome.tokens) == 2
    found = handover_of(system, outcome.terminal.request_id)
    assert sorted(found.read_ns) == list(range(NUM_CHUNKS))
    assert found.late_chunks in ([], [NUM_CHUNKS - 1])
    arrivals = [found.read_ns[index] for index in range(NUM_CHUNKS)]
    assert arrivals == sorted(arrivals), "in order, as they were computed"
