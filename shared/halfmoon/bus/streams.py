"""The streams there are. Whoever starts first makes them, so all must ask for the same: take the specs from here."""

from typing import Final

from halfmoon.bus.protocol import Retention, StreamSpec
from halfmoon.schemas import subjects

CHUNKS: Final = StreamSpec(
    name=subjects.CHUNKS_STREAM,
    subjects=subjects.CHUNK_EVENTS,
    retention=Retention.LIMITS,
    max_age_s=7 * 24 * 3600.0,
    max_bytes=512 * 1024 * 1024,
)
"""Chunk events. A week, or some 1.5 million chunks, is how long the registry and etcd may be away without a loss."""
