"""Bulk KV between hosts: one protocol, several ways. Pull only: the reader owns its memory."""
