"""Settings of a kv-tier."""

import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfmoon.config import CommonConfig
from halfmoon.eviction import PolicyName
from halfmoon.kv_tier.quotas import TenantQuotas, check_quotas
from halfmoon.kv_tier.ssd.reuse import Admission
from halfmoon.pool.arena import DEFAULT_SHM_DIR
from halfmoon.schemas.chunks import Tier


class KvTierConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is the variable `HALFMOON_KV_TIER_<FIELD>`."""

    node: Annotated[str, Meta(description="Name of this node in the cluster: one kv-tier each.", min_length=1)] = (
        msgspec.field(default_factory=socket.gethostname)
    )
    host: Annotated[
        str,
        Meta(
            description="Label of the machine. Nodes with the same label read each other's shared memory.", min_length=1
        ),
    ] = msgspec.field(default_factory=socket.gethostname)
    labels: Annotated[
        dict[str, str], Meta(description="Topology of the node, such as `rack` and `zone`, for placement.")
    ] = msgspec.field(default_factory=dict)
    arena_bytes: Annotated[int, Meta(description="Memory for KV, in bytes.", ge=4096)] = 1 << 30
    slot_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Bytes of one chunk at most, rounded up to pages. None: what the model's chunks need."),
    ] = None
    eviction_policy: Annotated[
        PolicyName,
        Meta(
            description="What goes from a full arena: `prefix_aware`, `lru`, `lfu`, `length_aware`, `arc`, `s3_fifo`."
        ),
    ] = PolicyName.PREFIX_AWARE
    tenants: Annotated[
        dict[str, TenantQuotas],
        Meta(
            description="What tenants may hold here, as JSON: "
            '`{"acme": {"dram": {"max_share": 0.5, "reserve_share": 0.2}, "ssd": {"max_bytes": 1000000000}}}`; '
            "`*` for all that aren't named. See docs/operating.md."
        ),
    ] = msgspec.field(default_factory=dict)
    engine: Annotated[str, Meta(description="Engine of this node's workers: `torch`, `vllm` or `sim`.")] = "torch"
    kv_dtype: Annotated[
        str,
        Meta(description="Element type of the workers' KV, which slot_bytes is derived from. `auto`: as on a CPU."),
    ] = "auto"
    shm_dir: Annotated[Path, Meta(description="Where the arena's file is made: a memory file system.")] = (
        DEFAULT_SHM_DIR
    )
    bind_host: Annotated[
        str, Meta(description="Address on which other machines read KV over tcp. Beyond loopback, set cluster_secret.")
    ] = "127.0.0.1"
    bind_port: Annotated[int, Meta(description="Port for that; 0 takes a free one.", ge=0, le=65535)] = 0
    rdma: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Reading over RDMA: where there is a device (`auto`), or not at all; `on` insists on one."),
    ] = "auto"
    rdma_devices: Annotated[
        tuple[str, ...], Meta(description="Names of the RDMA devices to use, such as `mlx5_0`. None named: all.")
    ] = ()
    rdma_gid_index: Annotated[
        Annotated[int, Meta(ge=0, le=255)] | None,
        Meta(description="Which of a port's addresses to use. None: RoCE v2 with an IPv4 address, where there is one."),
    ] = None
    rdma_queue_pairs: Annotated[
        int, Meta(description="Queue pairs per connection to a peer, spread over devices.", ge=1, le=16)
    ] = 2
    rdma_windows: Annotated[
        bool,
        Meta(description="Open slots lease by lease, where the devices can; else a reader's key opens them all."),
    ] = True
    advertised_host: Annotated[
        str | None, Meta(description="Host name or address that other nodes are told. None: bind_host.")
    ] = None
    max_pinned_share: Annotated[
        float, Meta(description="Share of the slots that may be pinned, so that requests always find room.", ge=0, le=1)
    ] = 0.5
    max_lease_s: Annotated[float, Meta(description="Longest lease that is granted; longer ones are cut.", gt=0)] = 120.0
    acquire_timeout_s: Annotated[
        float, Meta(description="Longest time that an acquire may spend on pulling chunks.", gt=0)
    ] = 30.0
    max_transfers: Annotated[int, Meta(description="Batches of chunks that are pulled at once.", ge=1, le=64)] = 4
    read_in_place: Annotated[
        bool,
        Meta(
            description="Whether decode reads chunks of this host's other nodes where they lie; else they are copied."
        ),
    ] = True
    transfer_chunks: Annotated[int, Meta(description="Chunks per batch at most.", ge=1, le=1024)] = 8
    copy_batch_bytes: Annotated[
        int,
        Meta(
            description="Bytes, at most, that are on their way here at once without a request for them: "
            "replicas and prefetched chunks.",
            ge=1,
        ),
    ] = 64 << 20
    copy_share: Annotated[
        float,
        Meta(
            description="Share of the arena, at most, for chunks that came without a request and aren't used yet. "
            "0: none are taken.",
            ge=0,
            le=1,
        ),
    ] = 0.1
    copy_give_up_s: Annotated[
        float, Meta(description="How long these may wait for a moment in which no pull waits for its turn.", gt=0)
    ] = 10.0
    trim_every_s: Annotated[
        float, Meta(description="How often a pool under pressure asks which of its chunks others hold too.", gt=0)
    ] = 1.0
    trim_free_share: Annotated[
        float,
        Meta(description="Pressure: a smaller share of the slots is free. 0: no copies are trimmed first.", ge=0, le=1),
    ] = 0.2

    ssd_dir: Annotated[
        Path | None,
        Meta(
            description="Directory, this node's own, for chunks that DRAM has no room for. None: there is no SSD tier."
        ),
    ] = None
    ssd_bytes: Annotated[int, Meta(description="Bytes that its files may take.", ge=1)] = 64 << 30
    ssd_threads: Annotated[int, Meta(description="Threads that read from it; half as many write.", ge=1, le=64)] = 4
    ssd_admission: Annotated[
        Admission,
        Meta(
            description="Which chunks are worth a write: `reused` ones, `all`, or (`auto`) the reused ones, and all "
            "while enough of the others come back."
        ),
    ] = Admission.AUTO
    ssd_max_age_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Files that were written longer ago are removed when the node starts. None: none are."),
    ] = 30 * 86_400.0
    high_watermark: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Share of DRAM in use above which chunks are moved to the SSD. None: as the traffic asks."),
    ] = None
    low_watermark: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        Meta(description="Share of DRAM in use at which that ends. Set both or neither."),
    ] = None
    promote_within: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="A chunk of the SSD is kept in DRAM again when it is read twice while the pool takes in so "
            "many chunks. None: as many as DRAM takes in before it gives an unused one up."
        ),
    ] = None

    def __post_init__(self) -> None:
        check_quotas(self.tenants, Tier.DRAM, self.arena_bytes)
        if (self.high_watermark is None) != (self.low_watermark is None):
            raise ValueError("high_watermark and low_watermark: set both, or neither")
        if (self.low_watermark or 0.0) >= (self.high_watermark or 1.0):
            raise ValueError(
                f"low_watermark is {self.low_watermark}, high_watermark {self.high_watermark}: lower the former"
            )
