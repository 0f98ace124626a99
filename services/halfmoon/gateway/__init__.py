"""The gateway: OpenAI's HTTP API in front of the token protocol."""
