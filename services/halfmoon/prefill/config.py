"""Settings of the prefill service."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from halfmoon.worker.config import WorkerConfig


class Announce(StrEnum):
    """When decode is told of the chunks that it can read."""

    EACH = "each"
    END = "end"


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    handover_timeout_s: Annotated[
        float,
        Meta(description="How long finished KV is held for a decode worker that doesn't say it has it.", gt=0),
    ] = 60.0
    announce: Annotated[
        Announce,
        Meta(
            description="When decode is told of chunks: `each` as it is finished, so that it reads them while the next "
            "are computed; `end`: all when the prompt is done, for comparison."
        ),
    ] = Announce.EACH
