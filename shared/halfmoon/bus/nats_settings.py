"""How to reach NATS."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """How to reach NATS. Secrets show neither in its repr nor in errors or logs."""

    url: str = field(default="nats://127.0.0.1:4222", repr=False)
    """One server, or several with commas between. May hold user and password: `shown` is the address without."""
    name: str = "halfmoon"
    """Shown by NATS monitoring."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    """File with JWT and seed."""
    tls: ssl.SSLContext | None = None
    """None: the system's, where the server asks for TLS."""
    connect_timeout_s: float = 10.0
    reconnect_max_s: float = 2.0
    """Longest pause between attempts to come back."""

    @property
    def urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",") if url.strip()]

    @property
    def shown(self) -> str:
        """The address, without what it may hold of user and password."""
        return ", ".join(_without_secrets(url) for url in self.urls)


def _without_secrets(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host = parts.hostname or "?"
    return f"{parts.scheme}://{host}:{parts.port or 4222}"
