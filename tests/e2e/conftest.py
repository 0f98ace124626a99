"""Running systems, one per way of moving KV, each started once for all tests that use it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.model import small_model
from support.system import System, free_port

CHUNK_TOKENS = 64
API_KEYS = '{"sk-alpha": "alpha", "sk-beta": "beta"}'
TORCH = (f"--chunk-tokens={CHUNK_TOKENS}", "--threads=1", "--arena-mib=320", "--prefill=2")
SIM = (f"--chunk-tokens={CHUNK_TOKENS}", "--engine=sim", "--arena-mib=16", "--prefill=2")


@pytest.fixture(scope="session")
def model() -> Path:
    return small_model()


@pytest.fixture(scope="session")
def shm_system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two prefill workers (node-a, node-b) and a decode worker (node-b); KV moves over shared memory."""
    system = System.start(tmp_path_factory.mktemp("shm"), model, *TORCH)
    yield system
    assert system.stop() == 0


@pytest.fixture(scope="session")
def conductor_metrics() -> str:
    """Where the conductor of `tcp_system` shows its metrics."""
    return f"http://127.0.0.1:{free_port()}/metrics"


@pytest.fixture(scope="session")
def tcp_system(model: Path, tmp_path_factory: pytest.TempPathFactory, conductor_metrics: str) -> Iterator[System]:
    """The same with the simulated engine; each node carries a host label of its own, so KV moves over tcp. With API
    keys."""
    port = conductor_metrics.rpartition(":")[2].partition("/")[0]
    environ = {"HALFMOON_GATEWAY_API_KEYS": API_KEYS, "HALFMOON_CONDUCTOR_METRICS_PORT": port}
    system = System.start(tmp_path_factory.mktemp("tcp"), model, *SIM, "--transport=tcp", environ=environ)
    yield system
    assert system.stop() == 0


@pytest.fixture(scope="session")
def torch_tcp_system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """`shm_system` over tcp."""
    system = System.start(tmp_path_factory.mktemp("torch-tcp"), model, *TORCH, "--transport=tcp")
    yield system
    assert system.stop() == 0


@pytest.fixture(scope="session", params=["shm_system", pytest.param("torch_tcp_system", marks=pytest.mark.nightly)])
def any_system(request: pytest.FixtureRequest) -> System:
    system = request.getfixturevalue(request.param)
    assert isinstance(system, System)
    return system


@pytest.fixture(scope="session")
def model_path(model: Path) -> Path:
    return model
