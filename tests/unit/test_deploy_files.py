"""The container files can't be run without Docker; what can be checked of them is."""

from pathlib import Path

import pytest
import yaml

from halfmoon.cli.settings import CONFIG_CLASSES, settings_of

ROOT = Path(__file__).parents[2]
SERVERS = {"nats", "etcd", "jaeger", "model"}


@pytest.fixture
def compose() -> dict[str, dict[str, dict[str, object]]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(document, dict)
    return document


def test_every_service_runs(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    started = {
        str(command[1]).replace("-", "_")
        for name, service in compose["services"].items()
        if name not in SERVERS and isinstance(command := service["command"], list)
    }
    assert started == set(CONFIG_CLASSES)


def test_every_setting_exists(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    common = {setting.variable for setting in settings_of(None)}
    for name, service in compose["services"].items():
        if name in SERVERS:
            continue
        command, environment = service["command"], service["environment"]
        assert isinstance(command, list)
        assert isinstance(environment, dict)
        own = {setting.variable for setting in settings_of(str(command[1]).replace("-", "_"))}
        assert set(environment) <= common | own, name


def test_published_ports_are_on_loopback(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]  # type: ignore[attr-defined]
    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)


def test_workers_share_memory_with_their_node(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    services = compose["services"]
    for worker, variable in (("prefill", "HALFMOON_PREFILL_NODE"), ("decode", "HALFMOON_DECODE_NODE")):
        environment = services[worker]["environment"]
        assert isinstance(environment, dict)
        pool = str(services[worker]["ipc"]).removeprefix("service:")
        pool_environment = services[pool]["environment"]
        assert isinstance(pool_environment, dict)
        assert environment[variable] == pool_environment["HALFMOON_KV_TIER_NODE"]
        assert services[pool]["ipc"] == "shareable"
