"""What `halfmoon up` starts, and where."""

from dataclasses import replace
from pathlib import Path

import pytest

from halfmoon.cli.up.plan import Endpoints, ProcessSpec, UpOptions, node_names, plan_processes

OPTIONS = UpOptions(model=Path("/models/m"), model_name="m", data_dir=Path("/data"), num_cores=4)
ENDPOINTS = Endpoints(nats_url="nats://127.0.0.1:1", etcd_url="http://127.0.0.1:2")


def plan(options: UpOptions) -> dict[str, ProcessSpec]:
    specs = plan_processes(options, ENDPOINTS, secret="s3cret", host="here")
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec for spec in specs}


def test_prefill_and_decode_are_on_different_nodes() -> None:
    specs = plan(OPTIONS)
    assert set(specs) == {
        "registry",
        "kv-tier-node-a",
        "kv-tier-node-b",
        "conductor",
        "prefill-1",
        "decode-1",
        "gateway",
    }
    assert specs["prefill-1"].environ["HALFMOON_PREFILL_NODE"] == "node-a"
    assert specs["decode-1"].environ["HALFMOON_DECODE_NODE"] == "node-b"
    assert specs["gateway"].environ["HALFMOON_GATEWAY_PORT"] == "8000"


def test_each_node_gets_its_own_folder_on_the_ssd_where_one_is_wanted() -> None:
    assert not [name for name in plan(OPTIONS)["kv-tier-node-a"].environ if "SSD" in name]
    specs = plan(replace(OPTIONS, ssd_bytes=5 << 20))
    for node in ("node-a", "node-b"):
        assert specs[f"kv-tier-{node}"].environ["HALFMOON_KV_TIER_SSD_DIR"] == f"/data/ssd/{node}"
        assert specs[f"kv-tier-{node}"].environ["HALFMOON_KV_TIER_SSD_BYTES"] == str(5 << 20)


def test_cores_are_shared_out_between_the_engines() -> None:
    assert plan(OPTIONS)["decode-1"].environ["HALFMOON_DECODE_THREADS"] == "2"
    assert plan(replace(OPTIONS, num_prefill=7))["decode-1"].environ["HALFMOON_DECODE_THREADS"] == "1"
    assert plan(replace(OPTIONS, threads=3))["decode-1"].environ["HALFMOON_DECODE_THREADS"] == "3"


@pytest.mark.parametrize(
    ("transport", "hosts", "rdma"),
    [
        ("auto", {"here"}, "auto"),
        ("tcp", {"here/node-a", "here/node-b"}, "off"),
        ("rdma", {"here/node-a", "here/node-b"}, "on"),
    ],
)
def test_host_labels_and_rdma_decide_how_kv_moves(transport: str, hosts: set[str], rdma: str) -> None:
    pools = [spec for spec in plan(replace(OPTIONS, transport=transport)).values() if spec.service == "kv_tier"]
    assert {spec.environ["HALFMOON_KV_TIER_HOST"] for spec in pools} == hosts
    assert {spec.environ["HALFMOON_KV_TIER_RDMA"] for spec in pools} == {rdma}


def test_colocated_workers_do_without_prefill_workers() -> None:
    specs = plan(replace(OPTIONS, colocated=True, num_decode=2))
    assert not [spec for spec in specs.values() if spec.service == "prefill"]
    assert [spec.environ["HALFMOON_DECODE_ROLE"] for spec in specs.values() if spec.service == "decode"] == [
        "colocated",
        "colocated",
    ]


def test_services_drain_for_as_long_as_they_are_waited_for() -> None:
    specs = plan(replace(OPTIONS, drain_timeout_s=4.0)).values()
    assert {spec.environ["HALFMOON_DRAIN_TIMEOUT_S"] for spec in specs} == {"4.0"}


def test_the_secret_is_handed_on_but_not_shown() -> None:
    for spec in plan(OPTIONS).values():
        assert spec.environ["HALFMOON_CLUSTER_SECRET"] == "s3cret"
        assert "s3cret" not in repr(spec)
        assert "s3cret" not in " ".join(spec.command)


def test_there_are_names_for_any_number_of_nodes() -> None:
    names = node_names(30)
    assert names[:2] == ["node-a", "node-b"]
    assert len(set(names)) == 30


def test_no_workers_make_no_system() -> None:
    with pytest.raises(ValueError, match="--decode must be at least 1, got 0"):
        replace(OPTIONS, num_decode=0)
