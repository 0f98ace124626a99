"""Requests for no tokens at all: the prompt's chunks get into a pool, and no decode worker's engine is used."""

from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.endpoint import announce
from halfmoon.schemas import subjects
from halfmoon.schemas.requests import Failed, Finished, FinishReason, Sampling
from halfmoon.schemas.splits import KvFailed, Role
from halfmoon.schemas.wire import Error, ErrorCode
from support.exact_engine import CHUNK_TOKENS
from support.workers import DECODE, PREFILL, Cluster, cluster, prompt

TOKENS = prompt(3 * CHUNK_TOKENS + 5)
NO_TOKENS = Sampling(max_tokens=0)


def finished(pair: Cluster, event: Finished | Failed, cached_tokens: int) -> None:
    assert isinstance(event, Finished)
    assert (event.finish_reason, event.seq, event.text) == (FinishReason.LENGTH, 0, "")
    usage = event.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(TOKENS), 0, cached_tokens)


async def test_prefill_fills_its_pool_and_decode_does_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as pair:
        _, _, cold = await pair.submit(TOKENS, sampling=NO_TOKENS)
        finished(pair, await cold.finished(), 0)
        await pair.idle()
        assert len(cold.events) == 1
        assert (await pair.node_a.client.stats()).num_chunks == 3
        _, _, again = await pair.submit(TOKENS, sampling=NO_TOKENS, reuse=[(pair.node_a.source,)] * 3)
        finished(pair, await again.finished(), 3 * CHUNK_TOKENS)
        await pair.idle()
        assert (pair.decode_engine.num_loads, pair.decode_engine.decoded_from) == (0, [])
        assert (await pair.node_b.client.stats()).num_chunks == 0
        assert pair.failures == []


async def test_a_prompt_that_prefill_gives_up_is_a_failure_that_says_why(tmp_path: Path) -> None:
    async with cluster(tmp_path) as pair:
        _, half = pair.halves(TOKENS, sampling=NO_TOKENS)
        reader = await pair.listen(half.reply)
        await pair.send_decode(half)
        why = Error(code=ErrorCode.INTERNAL, message="no room for it")
        news = KvFailed(request_id=half.request_id, transfer_id=half.transfer_id, worker=PREFILL, error=why)
        await announce(pair.bus, subjects.kv_ready(DECODE), news)
        event = await reader.failed()
        assert (event.error.code, event.error.message) == (ErrorCode.UNAVAILABLE, "no room for it")
        await pair.idle()


@pytest.mark.parametrize("num_slots", [8, 2])
async def test_a_colocated_worker_computes_it_for_its_own_pool(tmp_path: Path, num_slots: int) -> None:
    async with cluster(tmp_path, num_slots_b=num_slots, decode_settings={"role": Role.COLOCATED}) as pair:
        _, half = pair.halves(TOKENS, sampling=NO_TOKENS, prefill_worker=None)
        reader = await pair.listen(half.reply)
        await pair.send_decode(half)
        event = await reader.terminal()
        if num_slots == 8:
            finished(pair, event, 0)
        else:
            assert isinstance(event, Failed)
            assert "had no room" in event.error.message
        await pair.idle()
        assert (await pair.node_b.client.stats()).num_chunks == min(3, num_slots)
        assert pair.decode_engine.decoded_from == []


async def test_a_decode_worker_alone_has_nothing_to_do_but_to_say_whether_it_is_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as pair:
        for num_hot, is_there in ((3, True), (2, False)):
            _, half = pair.halves(TOKENS, sampling=NO_TOKENS, prefill_worker=None)
            half = msgspec.structs.replace(half, num_hot=num_hot)
            reader = await pair.listen(half.reply)
            await pair.send_decode(half)
            assert isinstance(await reader.terminal(), Finished) is is_there
        await pair.idle()
        assert pair.decode_engine.decoded_from == []
