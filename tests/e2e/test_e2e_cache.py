"""`halfmoon cache` against a running system, from warming to flushing, with a node that doesn't answer."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from halfmoon.cli.app import app
from support.system import System
from support.wait import until_blocking

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
SHARED = "The keeper of the light wrote the weather down every evening, and the wind, and who had passed. " * 8
PROMPTS = [SHARED + "What did he write on Monday?", SHARED + "And who passed on Sunday?" * 20]


def cache(system: System, *arguments: str) -> Result:
    """In this process: a Python each would take most of the time."""
    environ = {name: None for name in os.environ if name.startswith("HALFMOON_")}
    return CliRunner().invoke(
        app, ["cache", *arguments, f"--data-dir={system.data_dir}"], env={**environ, "COLUMNS": "200"}
    )


def answer(system: System, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = cache(system, *arguments, "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def keys_of(system: System, tenant: str, *arguments: str) -> set[str]:
    return {row["key"] for row in answer(system, "ls", f"--tenant={tenant}", "--limit=1000", *arguments)["chunks"]}


def cached_tokens(system: System, key: str, prompt: str) -> int:
    done = httpx.post(
        f"{system.url}/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert done.status_code == 200, done.text
    return int(done.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def has_reused(system: System) -> bool:
    stat = answer(system, "stat")
    return bool(0 < stat["cached_tokens"] < stat["prompt_tokens"])


def test_warm_look_pin_and_flush_a_tenant_while_a_node_is_silent(tcp_system: System, tmp_path: Path) -> None:
    system = tcp_system
    lines, prefix = tmp_path / "prompts.txt", tmp_path / "prefix.txt"
    lines.write_text("\n".join([*PROMPTS, "", "hi"]) + "\n")
    prefix.write_text(SHARED.rstrip() + "\n")
    for tenant in ("alpha", "beta"):
        answer(system, "flush", f"--tenant={tenant}", "--yes")

    first = answer(system, "warm", str(lines), "--tenant=alpha", "--concurrency=2")
    again = answer(system, "warm", str(lines), "--tenant=alpha")
    assert (first["num_done"], first["num_too_short"], first["num_failed"], first["num_missing"]) == (2, 1, 0, 0)
    assert (first["num_there"], again["num_new"], again["num_there"]) == (0, 0, first["num_new"])
    assert again["num_tokens"] == 0 < first["num_tokens"], "what is there isn't run again"
    assert cached_tokens(system, "sk-beta", PROMPTS[0]) == 0
    until_blocking(lambda: cached_tokens(system, "sk-beta", PROMPTS[0]) >= 64, what="the conductor has heard of it")
    assert cached_tokens(system, "sk-alpha", PROMPTS[0]) >= 64, "keys are those of the gateway"

    alpha, beta = keys_of(system, "alpha"), keys_of(system, "beta")
    assert len(alpha) >= first["num_new"] > 3
    assert not alpha & beta
    assert len(keys_of(system, "alpha", "--prefixes")) < len(alpha)
    paged: set[str] = set()
    page = answer(system, "ls", "--tenant=alpha", "--sort=key", "--limit=4")
    while page["next"] is not None:
        paged |= {row["key"] for row in page["chunks"]}
        page = answer(system, "ls", "--tenant=alpha", "--sort=key", "--limit=4", f"--after={page['next']}")
    assert paged | {row["key"] for row in page["chunks"]} == alpha

    pinned = answer(system, "pin", str(prefix), "--tenant=alpha")
    assert pinned["num_changed"] >= 2
    stat = answer(system, "stat")
    assert sum(node["pool"]["pinned"] for node in stat["nodes"]) >= pinned["num_changed"]
    assert {row["key"] for row in answer(system, "ls", "--tenant=alpha")["chunks"] if row["pinned"]} <= alpha
    until_blocking(lambda: has_reused(system), what="the conductor's heartbeat tells of what was reused")
    for screen in (cache(system, "stat"), cache(system, "ls", "--tenant=alpha")):
        assert screen.exit_code == 0, screen.stderr
        assert "node-a" in screen.stdout or "node-b" in screen.stdout

    silent = system.pid("kv-tier-node-b")
    os.kill(silent, signal.SIGSTOP)
    try:
        flushed = answer(system, "flush", "--tenant=alpha", "--yes", code=1)
    finally:
        os.kill(silent, signal.SIGCONT)
    errors = {node["node"]: node["error"] for node in flushed["nodes"]}
    assert errors["node-a"] == ""
    assert errors["node-b"] != ""
    assert flushed["num_unpinned"] == pinned["num_changed"]
    # Until it answers again, nothing is listed of it.
    until_blocking(
        lambda: keys_of(system, "beta") == beta and not keys_of(system, "alpha"), 30.0, what="node-b makes up for it"
    )
    assert cached_tokens(system, "sk-alpha", PROMPTS[0]) == 0
    assert cached_tokens(system, "sk-beta", PROMPTS[0]) >= 64

    gone = answer(system, "flush", "--tenant=beta", f"--prefix={prefix}", "--yes")
    assert sum(tier["num_chunks"] for node in gone["nodes"] for tier in node["tiers"]) >= len(beta)
    assert not keys_of(system, "beta")


def test_what_can_not_be_done_is_said_clearly(tcp_system: System, tmp_path: Path) -> None:
    short, wrong = tmp_path / "short.txt", tmp_path / "wrong.jsonl"
    short.write_text("hi")
    wrong.write_text('{"messages": [], "prompt": "x"}\n')
    for arguments, words in (
        (("flush", "--all"), "nobody to ask: add --yes"),
        (("flush",), "say what"),
        (("pin", str(short)), "as long as one chunk of 64 tokens"),
        (("pin", str(tmp_path / "nowhere.txt")), "can't be read"),
        (("pin", "--key=3f"), "expected 64 hex digits"),
        (("warm", str(wrong)), "line 1: give exactly one of"),
        (("warm", str(short), "--model=other"), "model 'other' isn't served"),
        (("ls", "--node=node-z"), "there is no node 'node-z'"),
    ):
        done = cache(tcp_system, *arguments)
        assert done.exit_code == 2, done.stdout
        assert words in " ".join(done.stderr.replace("│", " ").split()), done.stderr
        assert "Traceback" not in done.stderr
