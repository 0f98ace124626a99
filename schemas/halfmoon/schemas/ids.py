"""Identifiers, as distinct types, so that a node id can't be passed where a worker id is meant."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one request from submission to its one terminal message. Chosen by the submitter, unique for good."""

TransferId = NewType("TransferId", str)
"""Names one hand-over of KV from a prefill worker to a decode worker; both halves of a split carry it."""

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes: sha256 over the parent's key and the chunk's tokens. Equal keys mean equal KV. See `halfmoon.chunks`."""

LeaseId = NewType("LeaseId", str)
"""Names one holder's claim on a set of slots of one node."""

NodeId = NewType("NodeId", str)
"""Names one host's pool (one kv-tier process). Stable over restarts; the epoch tells the lives apart."""

WorkerId = NewType("WorkerId", str)
"""Names one process that heartbeats, of any role."""

ModelName = NewType("ModelName", str)
"""The name that users ask for. Never part of a chunk key: the weights' fingerprint is."""

TenantId = NewType("TenantId", str)


def new_request_id() -> RequestId:
    """A fresh request id: `req-` and 96 random bits in hex."""
    return RequestId(f"req-{secrets.token_hex(12)}")


def new_transfer_id() -> TransferId:
    return TransferId(f"xfer-{secrets.token_hex(8)}")


def new_lease_id() -> LeaseId:
    return LeaseId(f"lease-{secrets.token_hex(8)}")
