"""`halfmoon doctor` on a running system: well, with a node that nobody can read from, and with nothing there."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kv_tier_process import KvTierProcess
from support.system import System, clean_environ
from support.wait import until_blocking

pytestmark = pytest.mark.timeout(300)

SIM = ("--engine=sim", "--arena-mib=16", "--chunk-tokens=64")


@pytest.fixture(scope="module", params=["auto", pytest.param("tcp", marks=pytest.mark.nightly)])
def system(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System.start(tmp_path_factory.mktemp("doctor"), model, *SIM, f"--transport={request.param}")
    yield system
    system.stop()


def doctor(*arguments: str, width: int = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.app", "doctor", *arguments],
        env=clean_environ({"COLUMNS": str(width)}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def as_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = doctor("--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_well_cluster_is_said_to_be_well_with_figures_for_each_pair(system: System) -> None:
    here = f"--data-dir={system.data_dir}"
    code, found = as_json(here)
    assert code == 0, found
    checks = {check["name"]: check["verdict"] for check in found["checks"]}
    assert checks.keys() >= {"NATS", "registry and etcd", "members", "clock of node-a", "memory of node-b", "paths"}
    assert {pair["reader"] + pair["source"] for pair in found["pairs"]} == {"node-anode-b", "node-bnode-a"}
    expected = "shm" if "--transport=auto" in str(system.process.args) else "tcp"
    for pair in found["pairs"]:
        assert pair["chosen"] == expected
        paths = {path["transport"]: path for path in pair["paths"]}
        assert paths[expected]["gb_per_s"] > 0
        assert paths["shm"]["is_usable"] == (expected == "shm")
        assert expected == "shm" or "host" in paths["shm"]["reason"]
    assert {member["what"] for member in found["members"] if member["is_heard"]} == {
        "conductor", "decode", "gateway", "kv-tier", "prefill", "registry"
    }  # fmt: skip
    shown = doctor(here, "--no-measure")
    assert shown.returncode == 0
    for words in ("node-a", "node-b", expected, "round trip", "all is well"):
        assert words in shown.stdout, words
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("system", ["auto"], indirect=True)
def test_a_node_that_nobody_can_read_from_is_found(system: System, tmp_path: Path) -> None:
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    # Its cluster secret is another one, and so is its host: there is no way, in either direction.
    stranger = KvTierProcess(tmp_path, system.nats_url, "node-c", host="elsewhere", shm_dir=str(shm_dir))
    try:
        until_blocking(lambda: "pool ready" in stranger.log, 20, what="node-c serves")
        code, found = as_json(f"--data-dir={system.data_dir}")
        assert code == 1
        chosen = {(pair["reader"], pair["source"]): pair["chosen"] for pair in found["pairs"]}
        assert len(chosen) == 6
        assert {pair for pair, name in chosen.items() if name is None} == {
            (reader, source) for reader, source in chosen if "node-c" in (reader, source)
        }
        shown = doctor(f"--nats-url={system.nats_url}")
        assert shown.returncode == 1
        assert "cluster_secret" in shown.stdout
        assert "no way to read" in shown.stdout
    finally:
        stranger.close()
    here = f"--data-dir={system.data_dir}"
    until_blocking(lambda: doctor(here, "--no-measure").returncode == 0, 60, what="it is well again without node-c")


def test_without_a_broker_it_says_how_to_name_one(tmp_path: Path) -> None:
    done = doctor(f"--data-dir={tmp_path}", "--nats-url=nats://127.0.0.1:9")
    assert done.returncode == 1
    assert "HALFMOON_NATS_URL" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
