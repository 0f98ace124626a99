"""`halfmoon up --engine vllm`, as a user starts it: it answers, and leaves no process behind, however a worker ends."""

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from support.model import small_model
from support.outside import outside_client
from support.prompts import random_tokens
from support.reference import greedy
from support.system import System
from support.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(600)]

CHUNK_TOKENS = 64
START_TIMEOUT_S = 280.0
MAX_TOKENS = 6


def complete(system: System, prompt: str, max_tokens: int) -> str:
    """As the README's curl does."""
    body = {"model": small_model().name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{system.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def below(pid: int) -> set[int]:
    """All processes that this one has started, and they."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found, new = set[int](), {pid}
    while new := {child for each in new for child in children.get(each, ())} - found:
        found |= new
    return found


async def test_it_answers_and_leaves_no_process(tmp_path: Path) -> None:
    prompt = random_tokens(3 * CHUNK_TOKENS + 5, seed=900)
    [expected] = greedy(small_model(), [prompt], MAX_TOKENS)
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    options = ("--engine=vllm", f"--chunk-tokens={CHUNK_TOKENS}", "--threads=1", "--arena-mib=128")
    system = await asyncio.to_thread(System.start, tmp_path, small_model(), *options, timeout_s=START_TIMEOUT_S)
    try:
        assert await asyncio.to_thread(complete, system, "The capital of France is", 2) == " Paris."
        async with outside_client(system.nats_url, small_model().name) as client:
            cold = await client.ask(tokens=prompt, sampling=sampling)
            assert (cold.tokens, cold.usage["cached_tokens"]) == (expected, 0)
            warm = await client.ask(tokens=prompt, sampling=sampling)
            assert warm.tokens == expected
            assert warm.usage["cached_tokens"] >= 3 * CHUNK_TOKENS
        killed = system.pid("prefill-1")
        vllms = below(killed)
        assert len(vllms) >= 2, "vLLM's scheduler, and the rank that computes"
        os.kill(killed, signal.SIGKILL)
        await until(lambda: not any(is_alive(pid) for pid in vllms), 30, what="vLLM ends with its worker")
        everything = below(system.process.pid)
    finally:
        code = await asyncio.to_thread(system.stop)
    assert code == 0
    await until(lambda: not any(is_alive(pid) for pid in everything), 30, what="every process has ended")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
