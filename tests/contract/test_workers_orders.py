"""Messages in any order, at any pace: one terminal event, right tokens where it finished, nothing left behind."""

import asyncio
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, given, settings

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import announce
from halfmoon.bus.protocol import BusMessage
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.requests import Finished, RequestCancel
from halfmoon.schemas.splits import KvFailed, KvReady, Role, TransferDone
from halfmoon.schemas.wire import Error, ErrorCode, Message
from support.exact_engine import CHUNK_TOKENS, reference
from support.heart import Heart
from support.wait import until
from support.workers import DECODE, PREFILL, SEED, cluster, prompt

TOKENS = prompt(2 * CHUNK_TOKENS + 4)
ELSEWHERE = WorkerId("decode-elsewhere")

Step = tuple[str, int]
"""What is sent, and how many turns the loop makes afterwards."""

steps = st.permutations(["half", "half again", "ready 0", "ready 1", "ready 2", "failed", "cancel"]).flatmap(
    lambda order: st.tuples(
        st.integers(1, len(order)),
        st.lists(st.integers(0, 40), min_size=len(order), max_size=len(order)),
    ).map(lambda drawn: list(zip(order, drawn[1], strict=True))[: drawn[0]])
)


@given(steps)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_order_ends_once(script: list[Step]) -> None:
    if "half" not in [name for name, _ in script]:
        script = [*script, ("half", 0)]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(play(Path(folder), script), 30))


async def play(folder: Path, script: list[Step]) -> None:
    async with cluster(folder, decode_settings={"kv_wait_s": 0.3}) as pair:
        # Prefill's announcements are caught on their way, to be told in the script's order.
        caught: list[KvReady] = []
        decoder: Decoder[KvReady] = Decoder(KvReady)

        async def catch(message: BusMessage) -> None:
            ready = decoder.decode(message.data, message.headers)
            caught.extend(msgspec.structs.replace(ready, chunks=(chunk,)) for chunk in ready.chunks)

        await pair.bus.subscribe(subjects.kv_ready(ELSEWHERE), catch)
        prefill, half = pair.halves(TOKENS)
        # Nobody takes it for lost, however slow this machine is.
        elsewhere = Heart(pair.bus, msgspec.structs.replace(pair.decode.heartbeat(), worker=ELSEWHERE), every_s=0.1)
        await pair.send_prefill(msgspec.structs.replace(prefill, decode_worker=ELSEWHERE))
        await until(lambda: len(caught) == 3, what="three chunks")
        reader = await pair.listen(half.reply)
        failed = KvFailed(
            request_id=half.request_id,
            transfer_id=half.transfer_id,
            error=Error(code=ErrorCode.NO_SPACE, message="full"),
            worker=PREFILL,
        )
        messages: dict[str, tuple[str, Message]] = {
            "half": (subjects.split_decode(DECODE), half),
            "half again": (subjects.split_decode(DECODE), half),
            "failed": (subjects.kv_ready(DECODE), failed),
            "cancel": (subjects.CANCEL, RequestCancel(request_id=half.request_id)),
        } | {f"ready {at}": (subjects.kv_ready(DECODE), ready) for at, ready in enumerate(caught)}
        for name, turns in script:
            await announce(pair.bus, *messages[name])
            for _ in range(turns):
                await asyncio.sleep(0)
        terminal = await reader.terminal()
        await announce(
            pair.bus,
            subjects.split_prefill(PREFILL),
            TransferDone(request_id=half.request_id, transfer_id=half.transfer_id),
        )
        await pair.idle()
        await elsewhere.stop()
        assert len(reader.terminals) == 1
        assert reader.events[-1] is terminal
        assert len(pair.ended_of(Role.DECODE)) == 1
        if isinstance(terminal, Finished):
            assert reader.tokens == reference(TOKENS, 6, SEED)
        else:
            assert terminal.error.code is ErrorCode.CANCELLED
            assert "cancel" in [name for name, _ in script]
        assert pair.failures == []
