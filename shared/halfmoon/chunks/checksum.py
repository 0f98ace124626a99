"""Payload checksums: they tell damage, not forgery."""

import xxhash

CHECKSUM_BYTES = 16


def checksum(payload: memoryview | bytes) -> bytes:
    """xxh3-128 of `payload`, 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(payload)
