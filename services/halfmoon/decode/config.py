"""Settings of the decode service."""

from typing import Annotated

from msgspec import Meta

from halfmoon.schemas.splits import Role
from halfmoon.worker.config import WorkerConfig


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[
        Role,
        Meta(description="`decode`; or `colocated`: prompts are computed on this worker too, through the pool."),
    ] = Role.DECODE
    kv_wait_s: Annotated[
        float,
        Meta(description="How long to wait for a prompt's next chunk before the rest is computed here.", gt=0),
    ] = 60.0
    resplit_grace_s: Annotated[
        float,
        Meta(description="After a prefill worker is lost: time for another to take over its half.", ge=0),
    ] = 1.0
    early_transfers: Annotated[
        int, Meta(description="Transfers whose chunks may be announced before their half is here.", ge=1)
    ] = 256
    early_ttl_s: Annotated[
        float, Meta(description="How long such announcements are kept for a half that doesn't come.", gt=0)
    ] = 10.0
    max_unsent_tokens: Annotated[
        int,
        Meta(description="Tokens of one request that are kept while NATS is away; then its generation pauses.", ge=1),
    ] = 4096
