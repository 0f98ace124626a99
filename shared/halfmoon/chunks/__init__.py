"""Chunk keys, checksums, and how a prompt is cut into chunks. Pure."""
