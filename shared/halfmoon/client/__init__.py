"""The client of the token protocol: what the gateway, the command line and programs submit requests with."""

from halfmoon.client.generate import GenerateClient

__all__ = ["GenerateClient"]
