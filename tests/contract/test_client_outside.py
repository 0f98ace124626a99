"""A client that shares no code with us speaks the protocol: the example, as its reader would run it."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from halfmoon.schemas.wire import ErrorCode
from halfmoon.text import TextCodec
from support import tiny_tokenizer
from support.buses import BusMaker
from support.fake_cluster import Answering, FakeCluster, saying
from support.nats import NatsServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish.py"


async def _run(url: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HALFMOON_NATS_URL": url},
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.nats
async def test_the_example_asks_and_prints(nats_server: NatsServer, nats_buses: BusMaker, tmp_path: Path) -> None:
    codec = TextCodec.load(tiny_tokenizer.byte_level(tmp_path / "model"))
    cluster = FakeCluster(await nats_buses(), saying(codec, "the moon 😀"))
    await cluster.start()
    code, out, err = await _run(nats_server.url, "tiny", "why?")
    assert (code, err) == (0, "")
    assert out.startswith("the moon 😀\n")
    assert cluster.seen[0].messages == ({"role": "user", "content": "why?"},)
    code, out, _ = await _run(nats_server.url, "org/tiny-1.5", "[1, 2, 3]")
    assert code == 0
    assert cluster.seen[1].tokens == (1, 2, 3)

    async def refuse(answering: Answering) -> None:
        await answering.fail(ErrorCode.OVERLOADED, "later")

    cluster.script = refuse
    code, _, err = await _run(nats_server.url, "tiny", "why?")
    assert (code, err) == (1, "overloaded: later\n")
    await cluster.stop()
