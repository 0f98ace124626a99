"""Chunk and node metadata in etcd, membership, and the answers to who has what."""
