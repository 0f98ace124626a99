"""The recorder on a real broker: which requests it writes, once each, and that no prompt is in the file."""

import asyncio
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from halfmoon.bus.endpoint import announce
from halfmoon.bus.protocol import Bus
from halfmoon.planner.recorder import Recorder
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, PrefillHalf, Role
from halfmoon.traces import read_trace
from halfmoon.traces.recording import AnyLine, BlockHasher, EndLine, ModelLine, RequestLine
from support.buses import BusMaker
from support.examples import CARD, MODEL, WORKER_BEAT
from support.nats import NatsServer
from support.wait import until

pytestmark = pytest.mark.nats
CONDUCTOR = WorkerId("conductor-1")
TOKENS = tuple(range(1000, 1200))


def decode_half(name: str, tokens: tuple[int, ...] = TOKENS, tenant: str = "acme") -> DecodeHalf:
    return DecodeHalf(
        request_id=RequestId(name),
        transfer_id=TransferId(f"t-{name}"),
        conductor=CONDUCTOR,
        model=MODEL,
        tenant=TenantId(tenant),
        root=tenant.encode().ljust(32),
        tokens=tokens,
        sampling=Sampling(),
        seed=1,
        reply="_INBOX.x",
    )


async def send(bus: Bus, half: DecodeHalf, worker: str = "d.1") -> None:
    prefill = PrefillHalf(
        request_id=half.request_id,
        transfer_id=half.transfer_id,
        conductor=CONDUCTOR,
        model=MODEL,
        tenant=half.tenant,
        root=half.root,
        tokens=half.tokens,
        reuse=(),
        decode_worker=WorkerId(worker),
    )
    await announce(bus, subjects.split_decode(WorkerId(worker)), half)
    await announce(bus, subjects.split_prefill(WorkerId("p")), prefill)


async def end(bus: Bus, half: DecodeHalf, role: Role, num_generated_tokens: int = 0) -> None:
    ended = HalfEnded(
        request_id=half.request_id,
        transfer_id=half.transfer_id,
        worker=WorkerId("d.1"),
        role=role,
        num_generated_tokens=num_generated_tokens,
    )
    await announce(bus, subjects.ended(CONDUCTOR), ended)


async def test_each_request_is_written_once(nats_buses: BusMaker) -> None:
    bus, hearing = await nats_buses(), await nats_buses()
    lines: list[AnyLine] = []
    hasher = BlockHasher(b"k" * 32)
    recorder = Recorder(hearing, hasher, lines.append)
    await recorder.open()
    await announce(bus, subjects.heartbeat(WORKER_BEAT.worker), WORKER_BEAT)
    first, second = decode_half("r1"), decode_half("r2", tenant="other")
    # It came before the recording began, and waited.
    second = msgspec.structs.replace(second, service_class="batch", waited_s=1000.0)
    await send(bus, first)
    await send(bus, first, "d.2")  # refused by the first worker, offered to another
    await end(bus, first, Role.PREFILL)
    await end(bus, first, Role.DECODE, 7)
    await until(lambda: any(isinstance(line, RequestLine) for line in lines))
    await send(bus, msgspec.structs.replace(first, known=(5,)), "d.3")  # a late half of a request that has ended
    await send(bus, second)
    await until(lambda: recorder.counts.num_requests == 2)
    await bus.publish(subjects.split_decode(WorkerId("d.1")), b"\xc1 not a message")
    await until(lambda: recorder.counts.num_undecodable == 1)
    await recorder.close()
    await recorder.close()
    requests = [line for line in lines if isinstance(line, RequestLine)]
    assert [(each.completion_tokens, each.prompt_tokens, each.model) for each in requests] == [
        (7, 200, MODEL),
        (None, 200, MODEL),
    ]
    assert requests[0].blocks == hasher.blocks(first.root, TOKENS)
    assert len(requests[0].blocks) == 3
    assert not set(requests[0].blocks) & set(requests[1].blocks)
    assert requests[0].tenant != requests[1].tenant
    assert [each.service_class for each in requests] == [None, "batch"]
    assert requests[1].at_ms == 0
    models = [line for line in lines if isinstance(line, ModelLine)]
    assert {(model.name, model.kv_bytes_per_token) for model in models} == {(CARD.name, CARD.kv_bytes_per_token)}
    last = lines[-1]
    assert isinstance(last, EndLine)
    assert (last.num_requests, last.num_missed_messages, last.num_disconnects) == (2, 1, 0)


async def test_the_command_ends_in_order_at_ctrl_c(
    nats_server: NatsServer, nats_buses: BusMaker, tmp_path: Path
) -> None:
    out = tmp_path / "requests.jsonl"
    bus = await nats_buses()
    command = [sys.executable, "-m", "halfmoon.cli.app", "record", "--out", str(out), "--url", nats_server.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFMOON_")}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    half = decode_half("r1")
    try:
        await until(out.exists, 30.0)
        # It says nothing when it listens: the same half until it is heard, which counts once.
        async with asyncio.timeout(30.0):
            while b'"request"' not in out.read_bytes():
                await send(bus, half)
                await end(bus, half, Role.DECODE, 3)
                await bus.flush()
        assert len(read_trace(out).requests) == 1
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10.0):
            printed = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, "1 requests in" in " ".join(printed.split())) == (0, True), printed
    trace = read_trace(out)
    assert (len(trace.requests), trace.warnings) == (1, ())
    content = out.read_text()
    assert "acme" not in content
    # Two in a row: a single one may also be a time or a count.
    assert not [pair for pair in pairwise(TOKENS) if ",".join(map(str, pair)) in content]
