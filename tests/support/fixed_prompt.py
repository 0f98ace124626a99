"""One prompt, run on a pair of workers: what comes out, and that nothing is left."""

from halfmoon.prefill.state import HalfState as PrefillState
from halfmoon.schemas.requests import FinishReason
from halfmoon.schemas.splits import DecodeHalf, PrefillHalf, Role
from support.exact_engine import CHUNK_TOKENS, reference
from support.wait import until
from support.workers import SEED, Cluster, Reader, prompt

TOKENS = prompt(3 * CHUNK_TOKENS + 5)
EXPECTED = reference(TOKENS, 6, SEED)


async def announced(pair: Cluster) -> tuple[PrefillHalf, DecodeHalf, Reader]:
    """A prompt whose KV is all there, and held for a decode half that wasn't sent yet."""
    prefill, decode = pair.halves(TOKENS)
    reader = await pair.listen(decode.reply)
    await pair.send_prefill(prefill)
    await until(lambda: states(pair) == [PrefillState.HANDING_OVER], what="handing over")
    return prefill, decode, reader


def states(pair: Cluster) -> list[PrefillState]:
    return [run.state for run in pair.prefill._runs.values()]


async def right(pair: Cluster, reader: Reader, *, loaded_tokens: int) -> None:
    finished = await reader.finished()
    assert reader.tokens == EXPECTED
    assert len(reader.terminals) == 1
    assert finished.finish_reason is FinishReason.LENGTH
    assert pair.decode_engine.decoded_from == [loaded_tokens]
    await pair.idle()
    assert len(reader.terminals) == 1
    assert pair.ended_of(Role.DECODE)[-1].num_reused_tokens == loaded_tokens
