"""Settings of the prefill service."""

from typing import Annotated

from msgspec import Meta

from halfmoon.worker.config import WorkerConfig


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    handover_timeout_s: Annotated[
        float,
        Meta(description="How long finished KV is held for a decode worker that doesn't say it has it.", gt=0),
    ] = 60.0
