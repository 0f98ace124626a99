"""From options to processes: what runs where, with which settings, in which order. Pure."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_RDMA = {"auto": "auto", "tcp": "off", "rdma": "on"}
"""The kv-tiers' setting, by the transport that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `halfmoon up` was asked for."""

    model: Path
    model_name: str
    data_dir: Path
    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    num_nodes: int = 2
    engine: str = "torch"
    colocated: bool = False
    chunk_tokens: int = 256
    arena_bytes: int = 1 << 30
    ssd_bytes: int = 0
    """Per node, in a folder of its own below the data directory. 0: there is no SSD tier."""
    threads: int | None = None
    """Per engine; None: the cores, shared out."""
    transport: str = "auto"
    """`auto`: all nodes carry this machine's host label, so that KV moves over shm. `tcp`, `rdma`: one label each."""
    num_cores: int = 1
    drain_timeout_s: float = 30.0
    """How long each service may let work finish at a stop."""

    @property
    def shm_dir(self) -> Path:
        """Where the arenas are: a folder of this system's own, so that several can run on one machine."""
        return Path("/dev/shm") / f"halfmoon-{hashlib.sha256(str(self.data_dir).encode()).hexdigest()[:12]}"

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.removeprefix('num_')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the embedded servers answer."""

    nats_url: str
    etcd_url: str


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One service process."""

    name: str
    service: str
    """Package of the service: `halfmoon.<service>`."""
    node: str | None
    environ: Mapping[str, str] = field(repr=False)
    """Additions to the supervisor's own environment; holds the cluster secret."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"halfmoon.{self.service}"]


STOP_ORDER = ("gateway", "conductor", "prefill", "decode", "kv_tier", "registry")
"""Drain from the outside in: first nobody asks, then nobody places, then nobody computes, then the memory goes."""


def node_names(count: int) -> list[str]:
    """node-a, node-b, …, node-z, node-27, …"""
    return [f"node-{chr(ord('a') + i)}" if i < 26 else f"node-{i + 1}" for i in range(count)]


def plan_processes(options: UpOptions, endpoints: Endpoints, *, secret: str, host: str) -> list[ProcessSpec]:
    """All service processes, in the order in which they start.

    Prefill workers take the nodes from the first on, decode workers from the last, so that with two nodes a request's
    KV moves from one to the other.
    """
    common = {
        "HALFMOON_NATS_URL": endpoints.nats_url,
        "HALFMOON_DATA_DIR": str(options.data_dir),
        "HALFMOON_MODEL": str(options.model),
        "HALFMOON_MODEL_NAME": options.model_name,
        "HALFMOON_CHUNK_TOKENS": str(options.chunk_tokens),
        "HALFMOON_CLUSTER_SECRET": secret,
        "HALFMOON_DRAIN_TIMEOUT_S": str(options.drain_timeout_s),
    }
    nodes = node_names(options.num_nodes)
    num_engines = options.num_decode + (0 if options.colocated else options.num_prefill)
    threads = options.threads or max(1, options.num_cores // num_engines)
    specs: list[ProcessSpec] = []

    def add(name: str, service: str, place: str | None = None, /, **settings: str) -> None:
        own = {f"HALFMOON_{service.upper()}_{key.upper()}": value for key, value in settings.items()}
        environ = common | {"HALFMOON_WORKER_ID": name, "OMP_NUM_THREADS": str(threads)} | own
        specs.append(ProcessSpec(name, service, place, environ))

    add("registry", "registry", etcd_url=endpoints.etcd_url)
    for node in nodes:
        label = host if options.transport == "auto" else f"{host}/{node}"
        pool = {
            "node": node,
            "host": label,
            "arena_bytes": str(options.arena_bytes),
            "engine": options.engine,
            "shm_dir": str(options.shm_dir),
            "rdma": _RDMA[options.transport],
        }
        if options.ssd_bytes:
            pool |= {"ssd_dir": str(options.data_dir / "ssd" / node), "ssd_bytes": str(options.ssd_bytes)}
        add(f"kv-tier-{node}", "kv_tier", node, **pool)
    add("conductor", "conductor")
    engine = {"engine": options.engine, "threads": str(threads)}
    if not options.colocated:
        for i in range(options.num_prefill):
            node = nodes[i % len(nodes)]
            add(f"prefill-{i + 1}", "prefill", node, node=node, **engine)
    role = {"role": "colocated"} if options.colocated else {}
    for i in range(options.num_decode):
        node = nodes[-1 - i % len(nodes)]
        add(f"decode-{i + 1}", "decode", node, node=node, **engine, **role)
    add("gateway", "gateway", port=str(options.port))
    return specs
