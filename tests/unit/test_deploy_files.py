"""The container files can't be run without Docker; what can be checked of them is."""

import json
from pathlib import Path
from typing import Any

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


@pytest.fixture
def kubernetes() -> list[dict[str, Any]]:
    files = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def test_kubernetes_runs_every_service_with_settings_that_exist(kubernetes: list[dict[str, Any]]) -> None:
    common = {setting.variable for setting in settings_of(None)}
    started = set()
    for document in kubernetes:
        template = document["spec"]["template"]
        assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (container,) = template["spec"]["containers"]
        _, name = container["args"]
        service = name.replace("-", "_")
        started.add(service)
        own = {setting.variable for setting in settings_of(service)}
        assert {variable["name"] for variable in container["env"]} <= common | own, name
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert started == set(CONFIG_CLASSES)


def test_workers_are_where_a_pool_is_and_map_its_arena(kubernetes: list[dict[str, Any]]) -> None:
    pools = [each for each in kubernetes if each["kind"] == "DaemonSet"]
    racks = {each["spec"]["template"]["spec"]["nodeSelector"]["example.com/rack"] for each in pools}
    for pool in pools:
        (container,) = pool["spec"]["template"]["spec"]["containers"]
        labels = next(each["value"] for each in container["env"] if each["name"] == "HALFMOON_KV_TIER_LABELS")
        assert json.loads(labels)["rack"] in racks
    workers = [each for each in kubernetes if each["metadata"]["name"] in ("halfmoon-prefill", "halfmoon-decode")]
    assert len(workers) == 2
    for worker in workers:
        spec = worker["spec"]["template"]["spec"]
        (near,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert near["topologyKey"] == "kubernetes.io/hostname"
        for pool in pools:
            template = pool["spec"]["template"]
            assert near["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            assert [each for each in template["spec"]["volumes"] if each["name"] == "shm"] == [
                each for each in spec["volumes"] if each["name"] == "shm"
            ]
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["topologyKey"] == "example.com/rack"
