"""The gateway as a process on real NATS: it starts, says what is wrong, drains, and goes."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from halfmoon.bus.codec import Decoder
from halfmoon.bus.protocol import BusMessage
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Goodbye, Heartbeat, MemberState, ServiceHeartbeat
from halfmoon.text import TextCodec
from support import tiny_tokenizer
from support.buses import BusMaker
from support.fake_cluster import MODEL, Answering, FakeCluster, saying
from support.nats import NatsServer
from support.system import clean_environ, free_port
from support.wait import until, until_awaited

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level"))


def _environ(url: str, model: Path, data_dir: Path, port: int) -> dict[str, str]:
    return clean_environ(
        {
            "HALFMOON_NATS_URL": url,
            "HALFMOON_MODEL": str(model),
            "HALFMOON_MODEL_NAME": MODEL,
            "HALFMOON_DATA_DIR": str(data_dir),
            "HALFMOON_GATEWAY_PORT": str(port),
            "HALFMOON_WORKER_ID": "gateway-1",
        }
    )


@asynccontextmanager
async def _process(environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "halfmoon.gateway",
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
        await process.communicate()


async def test_it_lives_its_life(nats_server: NatsServer, nats_buses: BusMaker, model: Path, tmp_path: Path) -> None:
    codec = TextCodec.load(model)
    cluster = FakeCluster(await nats_buses(), saying(codec, "the moon 😀"))
    await cluster.start()
    beats: list[Heartbeat] = []
    decoder: Decoder[Heartbeat] = Decoder(Heartbeat)

    async def hear(message: BusMessage) -> None:
        beats.append(decoder.decode(message.data, message.headers))

    await (await nats_buses()).subscribe(subjects.heartbeat(WorkerId("gateway-1")), hear)
    async with _process(_environ(nats_server.url, model, tmp_path, 0)) as process:
        await until(lambda: any(isinstance(b, ServiceHeartbeat) and b.state is MemberState.SERVING for b in beats), 30)
        serving = beats[-1]
        assert isinstance(serving, ServiceHeartbeat)
        assert (serving.service, serving.pid) == ("gateway", process.pid)
        async with httpx.AsyncClient(base_url=serving.address, timeout=20) as http:

            async def is_ready() -> bool:
                return (await http.get("/ready")).status_code == 200

            await until_awaited(is_ready, 20, what="the gateway is ready")
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == "the moon 😀"

            going_on = asyncio.Event()

            async def slow(answering: Answering) -> None:
                await answering.tokens([1], "late")
                await going_on.wait()
                await answering.finish()

            cluster.script = slow
            num_seen = len(cluster.seen)
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            await until(lambda: len(cluster.seen) > num_seen)
            # What runs is finished; then it goes, and says so.
            process.send_signal(signal.SIGTERM)
            await until(lambda: isinstance(beats[-1], ServiceHeartbeat) and beats[-1].state is MemberState.DRAINING)
            going_on.set()
            assert (await asking).json()["choices"][0]["message"]["content"] == "late"
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await until(lambda: isinstance(beats[-1], Goodbye))
    await cluster.stop()


async def test_what_keeps_it_from_starting_is_one_clear_line(
    nats_server: NatsServer, model: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        good = _environ(nats_server.url, model, tmp_path, 0)
        for broken, said in (
            ({"HALFMOON_GATEWAY_PORT": str(port)}, "HALFMOON_GATEWAY_PORT"),
            ({"HALFMOON_MODEL": str(tmp_path / "missing")}, "no such folder"),
            ({"HALFMOON_GATEWAY_PROT": "8000"}, "did you mean HALFMOON_GATEWAY_PORT?"),
            (
                {"HALFMOON_NATS_URL": f"nats://127.0.0.1:{free_port()}", "HALFMOON_NATS_CONNECT_TIMEOUT_S": "0.5"},
                "127.0.0.1",
            ),
        ):
            async with _process(good | broken) as process:
                _, errors = await asyncio.wait_for(process.communicate(), 40)
                lines = errors.decode().strip().splitlines()
                assert process.returncode == 2, lines
                assert said in lines[-1]
                assert "Traceback" not in errors.decode()
