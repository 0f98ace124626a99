"""The streams there are. Whoever starts first makes them, so all must ask for the same: take the specs from here."""

from typing import Final

from halfmoon.bus.protocol import Retention, StreamSpec
from halfmoon.schemas import subjects

CHUNKS: Final = StreamSpec(
    name=subjects.CHUNKS_STREAM,
    subjects=subjects.CHUNK_EVENTS,
    retention=Retention.LIMITS,
    max_bytes=1 << 30,
)
"""Chunk events. Some three million chunks is how far the registry or etcd may fall behind without a loss."""

REQUESTS: Final = StreamSpec(
    name=subjects.REQUESTS_STREAM,
    subjects=(subjects.REQUEST_ALL,),
    retention=Retention.WORK_QUEUE,
    max_bytes=1 << 30,
)
"""Submitted requests, until their end. Some two thousand prompts of 128k tokens; more are refused."""
