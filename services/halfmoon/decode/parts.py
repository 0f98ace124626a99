"""What all halves of a decode worker share."""

from dataclasses import dataclass

import structlog

from halfmoon.bus.protocol import Bus
from halfmoon.decode.colocated import Colocated
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.metrics import DecodeMetrics
from halfmoon.decode.pull import ChunkPuller
from halfmoon.decode.standing import Standing
from halfmoon.pool.client import PoolClient
from halfmoon.schemas.ids import WorkerId
from halfmoon.text import TextCodec
from halfmoon.tracing import Tracer
from halfmoon.worker.line import Places
from halfmoon.worker.meters import DecodeMeter, PrefillMeter
from halfmoon.worker.peers import PeerWatch
from halfmoon.worker.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    worker: WorkerId
    config: DecodeConfig
    bus: Bus
    pool: PoolClient
    codec: TextCodec
    sequences: Sequences
    places: Places
    peers: PeerWatch
    puller: ChunkPuller
    colocated: Colocated
    prefill_meter: PrefillMeter
    decode_meter: DecodeMeter
    standing: Standing
    tracer: Tracer
    metrics: DecodeMetrics
    log: structlog.stdlib.BoundLogger
