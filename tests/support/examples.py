"""One example of every message, with every field set: what golden bytes and round trips are made from."""

from halfmoon.schemas import (
    caches,
    chunks,
    copies,
    kv_tier,
    members,
    model,
    orders,
    probes,
    prompts,
    rdma,
    registry,
    requests,
    splits,
    wire,
)
from halfmoon.schemas.ids import (
    ChunkKey,
    LeaseId,
    ModelName,
    NodeId,
    RequestId,
    TenantId,
    TransferId,
    WorkerId,
)

REQUEST = RequestId("req-1")
TRANSFER = TransferId("xfer-1")
LEASE = LeaseId("lease-1")
NODE = NodeId("node-a")
WORKER = WorkerId("prefill-1")
MODEL = ModelName("SmolLM2-135M-Instruct")
TENANT = TenantId("acme")
KEY = ChunkKey(bytes(range(32)))
PARENT = ChunkKey(bytes(32))
EPOCH = 1_700_000_000_000_000_000

ERROR = wire.Error(code=wire.ErrorCode.OVERLOADED, message="try later", retry_after_s=1.5)
SOURCE = kv_tier.ChunkSource(node=NODE, epoch=EPOCH)
SLOT = kv_tier.SlotRef(slot=3, generation=7, num_bytes=4096, checksum=bytes(16))
META = chunks.ChunkMeta(
    key=KEY,
    index=2,
    num_tokens=256,
    num_bytes=4096,
    checksum=bytes(16),
    request_id=REQUEST,
    created_ns=EPOCH,
    parent=PARENT,
    model=MODEL,
    tenant=TENANT,
    tier=chunks.Tier.SSD,
    hits=4,
    last_access_ns=EPOCH + 1,
)
SAMPLING = requests.Sampling(
    max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, seed=-1, stop=("\n",), logprobs=2, ignore_eos=True
)
LOGPROB = requests.TokenLogprob(
    token=5, text="a", logprob=-0.5, top=(requests.TopLogprob(token=6, text="b", logprob=-1.0),)
)
CARD = model.ModelCard(
    name=MODEL,
    engine="torch",
    fingerprint="ab" * 32,
    kv_dtype="float32",
    layout="lktHd.v1",
    kv_bytes_per_token=46_080,
    chunk_tokens=256,
    max_model_tokens=8192,
    vocab_size=49_152,
)
QUEUE_PAIR = rdma.QueuePairEnd(
    port=rdma.RdmaPort(
        device="mlx5_0",
        port=1,
        link_layer=rdma.LinkLayer.ETHERNET,
        gid=bytes(10) + b"\xff\xff\x0a\x00\x00\x01",
        gid_index=3,
        mtu_bytes=4096,
        speed_mbps=200_000,
        numa_node=1,
        pci_address="0000:5e:00.0",
        max_reads=16,
        max_initiated_reads=16,
        max_message_bytes=1 << 30,
    ),
    number=4711,
    first_sequence=815,
)
POOL = kv_tier.PoolStats(
    total=8,
    free=4,
    staged=1,
    ready=2,
    leased=1,
    num_leases=1,
    num_chunks=2,
    hits_local=1,
    hits_remote=2,
    misses=3,
    evictions=4,
    bytes_pulled=5,
    bytes_served=6,
)
WORKER_BEAT = members.WorkerHeartbeat(
    worker=WORKER,
    role=splits.Role.DECODE,
    node=NODE,
    started_ns=EPOCH,
    state=members.MemberState.SERVING,
    load_progress=0.5,
    card=CARD,
    num_running=1,
    num_waiting=2,
    queued_tokens=3,
    free_tokens=4,
    total_tokens=5,
    max_requests=6,
    prefill_tokens_per_s=300.0,
    decode_step_s=0.07,
    requests=(members.RequestProgress(request_id=REQUEST, num_tokens=2, new_tokens=(8, 9)),),
    pid=42,
)
NODE_BEAT = members.NodeHeartbeat(
    worker=WorkerId("kv-tier-node-a"),
    node=NODE,
    epoch=EPOCH,
    started_ns=EPOCH,
    state=members.MemberState.DRAINING,
    host="host-1",
    slot_bytes=4096,
    pool=POOL,
    queued_transfers=1,
    labels={"rack": "r1"},
    pid=43,
)
SERVICE_BEAT = members.ServiceHeartbeat(
    worker=WorkerId("gateway-1"),
    service="gateway",
    started_ns=EPOCH,
    state=members.MemberState.SERVING,
    address="http://127.0.0.1:8000",
    pid=44,
)
SELECTION = orders.Selection(tenant=TENANT, model=MODEL, keys=(KEY,), prefixes=(PARENT,), everything=True)
FLUSH = orders.FlushOrder(seq=7, before_ns=EPOCH, selection=SELECTION)
PIN = orders.PinOrder(key=KEY, model=MODEL, tenant=TENANT, parent=PARENT)
TIER_FLUSH = kv_tier.TierFlush(tier=chunks.Tier.DRAM, num_chunks=2, num_bytes=8192)
PLACEMENT = chunks.ChunkPlacement(node=NODE, epoch=EPOCH, chunk=META)

EXAMPLES: tuple[wire.Message, ...] = (
    ERROR,
    requests.RequestSubmitted(
        request_id=REQUEST,
        model=MODEL,
        tokens=(1, 2, 3),
        sampling=SAMPLING,
        reply="_INBOX.1",
        encoding=requests.Encoding.JSON,
        tenant=TENANT,
        priority=1,
        deadline_ns=EPOCH,
    ),
    requests.RequestCancel(request_id=REQUEST, reason="no longer needed"),
    requests.Tokens(request_id=REQUEST, seq=3, tokens=(5,), text="a", logprobs=(LOGPROB,)),
    requests.Finished(
        request_id=REQUEST,
        seq=4,
        text="b",
        finish_reason=requests.FinishReason.LENGTH,
        usage=requests.Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2),
    ),
    requests.Failed(request_id=REQUEST, error=ERROR),
    chunks.ChunkRegistered(node=NODE, epoch=EPOCH, chunks=(META,)),
    chunks.ChunkEvicted(node=NODE, epoch=EPOCH, keys=(KEY,), reason=chunks.EvictReason.CAPACITY),
    chunks.NodeCleared(node=NODE, epoch=EPOCH),
    kv_tier.NodeInfo(
        node=NODE,
        epoch=EPOCH,
        host="host-1",
        arena_path="/dev/shm/halfmoon-node-a",
        slot_bytes=4096,
        num_slots=8,
        tcp_address="127.0.0.1:7000",
    ),
    kv_tier.Describe(),
    kv_tier.Acquire(
        request_id=REQUEST,
        holder=WORKER,
        chunks=(kv_tier.WantedChunk(key=KEY, index=2, num_tokens=256, num_bytes=4096, sources=(SOURCE,)),),
        lease_s=10.0,
        keep=False,
    ),
    kv_tier.Acquired(
        lease_id=LEASE,
        expires_ns=EPOCH,
        chunks=(
            kv_tier.AcquiredChunk(
                key=KEY,
                index=2,
                outcome=chunks.ChunkOutcome.HIT_REMOTE,
                slot=SLOT,
                meta=META,
                source=NODE,
                transport="tcp",
                num_bytes_moved=4096,
                started_ns=1,
                transfer_started_ns=2,
                finished_ns=3,
                detail="pulled",
            ),
        ),
    ),
    kv_tier.Reserve(
        request_id=REQUEST,
        holder=WORKER,
        chunks=(kv_tier.NewChunk(key=KEY, index=2, num_tokens=256, num_bytes=4096, parent=PARENT, register=False),),
        lease_s=10.0,
    ),
    kv_tier.Reserved(lease_id=LEASE, expires_ns=EPOCH, chunks=(kv_tier.ReservedChunk(key=KEY, index=2, slot=SLOT),)),
    kv_tier.Commit(lease_id=LEASE, chunks=(kv_tier.WrittenChunk(slot=3, generation=7, meta=META, register=False),)),
    kv_tier.Committed(num_registered=1),
    kv_tier.Release(lease_ids=(LEASE,)),
    kv_tier.Renew(lease_ids=(LEASE,), lease_s=10.0),
    kv_tier.Renewed(expired=(LEASE,)),
    kv_tier.Report(key=KEY, slot=3, generation=7),
    kv_tier.Inventory(after=KEY, limit=100),
    kv_tier.InventoryPage(node=NODE, epoch=5, keys=(KEY,), pending=1),
    kv_tier.Retell(keys=(KEY,)),
    kv_tier.FlushChunks(order=FLUSH, unpin=(KEY,)),
    kv_tier.ChunksFlushed(tiers=(TIER_FLUSH,), num_leased=1),
    kv_tier.PinChunks(seq=7, keys=(KEY,)),
    kv_tier.UnpinChunks(seq=7, keys=(KEY,)),
    kv_tier.PinsHeld(num_pinned=1, num_absent=2, num_refused=3, max_slots=4),
    kv_tier.CatchUp(),
    kv_tier.ListChunks(
        selection=SELECTION,
        tier=chunks.Tier.SSD,
        order=kv_tier.ChunkOrder.HITS,
        ends_only=True,
        after=KEY,
        limit=10,
    ),
    kv_tier.ChunkList(
        epoch=EPOCH, chunks=(kv_tier.HeldChunk(meta=META, num_leases=1, is_pinned=True),), num_matching=5
    ),
    kv_tier.Done(),
    kv_tier.Stats(),
    probes.Probe(peer=NODE, num_bytes=4096, time_limit_s=0.5),
    probes.Probed(
        node=NODE,
        epoch=EPOCH,
        host="host-1",
        now_ns=EPOCH + 1,
        memory_dir="/dev/shm",
        memory_total_bytes=8192,
        memory_free_bytes=4096,
        peer=NodeId("node-b"),
        paths=(
            probes.ProbedPath(
                transport="tcp", is_usable=False, reason="it serves no tcp", gb_per_s=2.5, num_bytes=4096
            ),
        ),
        chosen="tcp",
        detail="node node-b does not answer",
    ),
    POOL,
    rdma.RdmaHello(reader="node-b"),
    rdma.RdmaChallenge(node=NODE, epoch=EPOCH, nonce=bytes(32)),
    rdma.RdmaConnect(
        reader="node-b",
        node=NODE,
        epoch=EPOCH,
        server_nonce=bytes(32),
        reader_nonce=bytes(range(32)),
        queue_pairs=(rdma.WantedQueuePair(end=QUEUE_PAIR, device="mlx5_1", port=1),),
        proof=bytes(32),
    ),
    rdma.RdmaConnected(
        connection=bytes(16),
        reader_nonce=bytes(range(32)),
        queue_pairs=(QUEUE_PAIR,),
        arena_address=0x7F00_0000_0000,
        table_keys=(0x1234,),
        proof=bytes(32),
    ),
    rdma.RdmaGrant(
        connection=bytes(16),
        sequence=1,
        lease_id=LEASE,
        ranges=(rdma.RdmaRange(slot=3, generation=7, end=4096, queue_pair=0),),
        proof=bytes(32),
    ),
    rdma.RdmaGranted(
        connection=bytes(16),
        sequence=1,
        access=(
            rdma.RdmaAccess(verdict=rdma.RdmaVerdict.OPEN, key=0x5678),
            rdma.RdmaAccess(verdict=rdma.RdmaVerdict.STALE, detail="slot 4 is in generation 8, not 7"),
        ),
        proof=bytes(32),
    ),
    rdma.RdmaDisconnect(connection=bytes(16), proof=bytes(32)),
    splits.PrefillHalf(
        request_id=REQUEST,
        transfer_id=TRANSFER,
        conductor=WorkerId("conductor-1"),
        model=MODEL,
        tenant=TENANT,
        root=bytes(32),
        tokens=(1, 2, 3),
        reuse=((SOURCE,),),
        decode_worker=WorkerId("decode-1"),
        attempt=2,
    ),
    splits.DecodeHalf(
        request_id=REQUEST,
        transfer_id=TRANSFER,
        conductor=WorkerId("conductor-1"),
        model=MODEL,
        tenant=TENANT,
        root=bytes(32),
        tokens=(1, 2, 3),
        sampling=SAMPLING,
        seed=9,
        reply="_INBOX.1",
        encoding=requests.Encoding.JSON,
        prefill_worker=WORKER,
        known=(7,),
        cached_tokens=2,
        attempt=2,
    ),
    splits.HalfAccepted(request_id=REQUEST),
    splits.KvReady(
        request_id=REQUEST,
        transfer_id=TRANSFER,
        source=SOURCE,
        chunks=(
            splits.ReadyChunk(key=KEY, index=2, num_tokens=256, num_bytes=4096, outcome=chunks.ChunkOutcome.COMPUTED),
        ),
        num_chunks=3,
        cached_tokens=512,
    ),
    splits.KvFailed(request_id=REQUEST, transfer_id=TRANSFER, error=ERROR),
    splits.TransferDone(request_id=REQUEST, transfer_id=TRANSFER),
    splits.HalfEnded(
        request_id=REQUEST,
        transfer_id=TRANSFER,
        worker=WORKER,
        role=splits.Role.COLOCATED,
        error=ERROR,
        num_reused_tokens=1,
        num_computed_tokens=2,
        num_generated_tokens=3,
        duration_s=0.5,
    ),
    WORKER_BEAT,
    NODE_BEAT,
    SERVICE_BEAT,
    members.Goodbye(worker=WORKER),
    caches.CacheSnapshot(worker=WORKER, started_ns=EPOCH, seq=3, keys=(KEY, PARENT), part=1, num_parts=2),
    caches.CacheChanges(worker=WORKER, started_ns=EPOCH, seq=4, added=(KEY,), removed=(PARENT,)),
    registry.Lookup(keys=(KEY,)),
    registry.LookedUp(placements=((PLACEMENT,),)),
    registry.Snapshot(cursor=b"c", revision=5, limit=10),
    registry.SnapshotPage(revision=5, stream_seq=6, placements=(PLACEMENT,), cursor=b"d"),
    registry.Flush(selection=SELECTION),
    registry.Flushed(
        seq=7,
        before_ns=EPOCH,
        nodes=(registry.NodeFlush(node=NODE, tiers=(TIER_FLUSH,), num_leased=1, error="no answer"),),
        workers=(registry.WorkerFlush(worker=WORKER, num_chunks=3, error="no answer"),),
        num_unpinned=1,
    ),
    registry.Pin(chunks=(PIN,)),
    registry.Unpin(selection=SELECTION),
    registry.PinsChanged(
        seq=8,
        num_changed=1,
        num_pins=2,
        nodes=(
            registry.NodePins(
                node=NODE, num_pinned=1, num_absent=2, num_refused=3, max_slots=4, error="no answer"
            ),
        ),
    ),
    registry.Orders(after=6),
    registry.StandingOrders(seq=8, flushes=(FLUSH,), pins=(PIN,)),
    orders.Forget(order=FLUSH),
    orders.Forgotten(worker=WORKER, num_chunks=3),
    prompts.PromptKeys(model=MODEL, tenant=TENANT, tokens=(1, 2)),
    prompts.PromptChunks(model=MODEL, tenant=TENANT, num_tokens=600, chunk_tokens=256, keys=(PARENT, KEY)),
    copies.Replicate(
        chunks=(kv_tier.WantedChunk(key=KEY, index=2, num_tokens=256, num_bytes=4096, sources=(SOURCE,)),),
        cause=copies.Cause.DEMAND,
    ),
    copies.Replicating(num_here=1, num_queued=2),
    copies.AskSurplus(node=NODE, keys=(PARENT, KEY)),
    copies.Surplus(keys=(KEY,)),
    registry.Members(),
    registry.MemberList(members=(WORKER_BEAT, NODE_BEAT, SERVICE_BEAT)),
    registry.MemberJoined(worker=WORKER, node=NODE),
    registry.MemberLost(worker=WORKER, node=NODE, reason="no heartbeat for 2 s"),
)
