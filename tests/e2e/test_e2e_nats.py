"""The public protocol on the real system: requests from programs and shells that know nothing of us."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest

from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, WorkerId
from support.outside import outside_client
from support.prompts import random_tokens
from support.reference import greedy
from support.system import System

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
EXAMPLE = Path(__file__).parents[2] / "examples" / "publish.py"


def test_the_example_answers(shm_system: System) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), MODEL, "Say hello.", "12"],
        env=os.environ | {"HALFMOON_NATS_URL": shm_system.nats_url},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *text, usage = done.stdout.rstrip().splitlines()
    assert "ello" in "".join(text)
    assert "'completion_tokens'" in usage


def test_the_example_takes_token_ids(shm_system: System, model_path: Path) -> None:
    prompt = random_tokens(70, 99)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), MODEL, json.dumps(prompt), "5"],
        env=os.environ | {"HALFMOON_NATS_URL": shm_system.nats_url},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "'prompt_tokens': 70, 'completion_tokens': 5" in done.stdout


async def test_plain_request_reply_in_json(shm_system: System, model_path: Path) -> None:
    """What `nats req halfmoon.generate.<model> '{…}' --replies=0` does: a request, and many replies on one inbox."""
    prompt = random_tokens(9, 98)
    [expected] = greedy(model_path, [prompt], 5)
    connection = await nats.connect(shm_system.nats_url)
    try:
        inbox = connection.new_inbox()
        replies = await connection.subscribe(inbox)
        body = {"tokens": prompt, "sampling": {"temperature": 0, "max_tokens": 5, "ignore_eos": True}}
        await connection.publish(f"halfmoon.generate.{MODEL}", json.dumps(body).encode(), reply=inbox)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] == "tokens.v1":
            events.append(json.loads((await replies.next_msg(50)).data))
    finally:
        await connection.close()
    assert [token for event in events for token in event.get("tokens", [])] == expected
    assert events[-1]["type"] == "finished.v1"
    assert events[-1]["finish_reason"] == "length"


async def test_a_single_reply_is_enough_for_an_error(shm_system: System) -> None:
    connection = await nats.connect(shm_system.nats_url)
    try:
        for body in (b"{", b'{"prompt": ""}', b'{"prompt": "x", "sampling": {"max_tokens": -1}}', b'{"prompt": 5}'):
            reply = await connection.request(f"halfmoon.generate.{MODEL}", body, timeout=20)
            event = json.loads(reply.data)
            assert event["type"] == "failed.v1", body
            assert event["error"]["code"] in ("invalid_message", "invalid_request"), body
        reply = await connection.request("halfmoon.generate.no-such-model", b'{"prompt": "x"}', timeout=20)
        assert json.loads(reply.data)["error"]["code"] == "model_not_found"
        assert MODEL in json.loads(reply.data)["error"]["message"]
    finally:
        await connection.close()


async def test_over_long_and_empty_prompts_are_refused(shm_system: System) -> None:
    async with outside_client(shm_system.nats_url, MODEL) as client:
        long = await client.ask(tokens=[5] * 8193, sampling={"max_tokens": 1})
        empty = await client.ask(tokens=[], sampling={"max_tokens": 1})
        strange = await client.ask(tokens=[49_152], sampling={"max_tokens": 1})
    assert long.terminal["error"]["code"] == "prompt_too_long"
    assert "8193" in long.terminal["error"]["message"]
    assert empty.terminal["error"]["code"] == "invalid_request"
    assert strange.terminal["error"]["code"] == "invalid_request"
    assert [len(answer.events) for answer in (long, empty, strange)] == [1, 1, 1]


async def test_rubbish_on_every_subject_stalls_nothing(shm_system: System) -> None:
    bus = await NatsBus.connect(NatsSettings(url=shm_system.nats_url))
    rubbish = (b"", b"\xc1", b"\x00" * 50, b"{", msgpack.packb({"type": "no.such.v1"}), msgpack.packb([1, 2]))
    core = [
        subjects.CANCEL,
        subjects.split_prefill(WorkerId("prefill-1")),
        subjects.split_decode(WorkerId("decode-1")),
        subjects.kv_ready(WorkerId("decode-1")),
        subjects.ended(WorkerId("conductor")),
        subjects.heartbeat(WorkerId("prefill-1")),
        subjects.generate(MODEL),  # type: ignore[arg-type]
        subjects.member(WorkerId("prefill-1")),
        *(
            f"{subjects.kv_tier(NodeId('node-a'))}.{verb}"
            for verb in ("acquire", "reserve", "commit", "release", "renew")
        ),
        *(subjects.registry(verb) for verb in ("lookup", "snapshot", "members")),
    ]
    streams = [
        subjects.request(MODEL),  # type: ignore[arg-type]
        subjects.chunk_registered(NodeId("node-z")),
        subjects.evict(NodeId("node-z")),
    ]
    try:
        for bytes_ in rubbish:
            for subject in core:
                await bus.publish(subject, bytes_, reply=bus.new_inbox())
            for subject in streams:
                await bus.stream_publish(subject, bytes_)
        await bus.flush()
    finally:
        await bus.close()
    async with outside_client(shm_system.nats_url, MODEL) as client:
        answers = await asyncio.gather(
            *(client.ask(prompt="One, two,", sampling={"max_tokens": 2, "temperature": 0}) for _ in range(3))
        )
    assert [answer.text for answer in answers] == [" or three"] * 3
    assert shm_system.process.poll() is None
    assert "starting it again" not in shm_system.text
