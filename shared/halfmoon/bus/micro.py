"""The NATS services API (ADR-32, https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-32.md).

What `nats micro ls`, `info` and `stats` ask on `$SRV.<verb>[.<name>[.<id>]]`, answered over any `Bus`.
"""

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from halfmoon.bus.protocol import Bus, BusMessage, Subscription

_PREFIX = "$SRV"
_TYPE = "io.nats.micro.v1"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


class MicroEndpoint:
    """One endpoint's figures."""

    def __init__(self, name: str, subject: str, queue: str | None) -> None:
        self.name = name
        self.subject = subject
        self.queue = queue
        self.num_requests = 0
        self.num_errors = 0
        self.last_error = ""
        self.processing_ns = 0

    def count(self, duration_ns: int, error: str | None = None) -> None:
        self.num_requests += 1
        self.processing_ns += duration_ns
        if error is not None:
            self.num_errors += 1
            self.last_error = error

    def info(self) -> dict[str, object]:
        return {"name": self.name, "subject": self.subject, "queue_group": self.queue or "", "metadata": {}}

    def stats(self) -> dict[str, object]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue or "",
            "num_requests": self.num_requests,
            "num_errors": self.num_errors,
            "last_error": self.last_error,
            "processing_time": self.processing_ns,
            "average_processing_time": self.processing_ns // self.num_requests if self.num_requests else 0,
        }


class MicroService:
    """One process's entry."""

    def __init__(self, name: str, version: str, description: str, metadata: Mapping[str, str]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a service's name is letters, digits, '-' and '_', got {name!r}")
        if not _VERSION.fullmatch(version):
            raise ValueError(f"a service's version is semantic, such as 1.2.3, got {version!r}")
        self.id = secrets.token_hex(11).upper()
        self.name = name
        self._identity: dict[str, object] = {
            "name": name,
            "id": self.id,
            "version": version,
            "metadata": dict(metadata),
        }
        self._description = description
        self._started = datetime.now(UTC)
        self._endpoints: list[MicroEndpoint] = []
        self._subscriptions: list[Subscription] = []

    async def start(self, bus: Bus) -> None:
        """Answer on all nine subjects."""
        for verb in ("PING", "INFO", "STATS"):

            async def answer(message: BusMessage, verb: str = verb) -> None:
                await bus.respond(message, msgspec.json.encode(self._answer(verb)))

            for suffix in ("", f".{self.name}", f".{self.name}.{self.id}"):
                self._subscriptions.append(await bus.subscribe(f"{_PREFIX}.{verb}{suffix}", answer))

    def add_endpoint(self, name: str, subject: str, queue: str | None = None) -> MicroEndpoint:
        endpoint = MicroEndpoint(name, subject, queue)
        self._endpoints.append(endpoint)
        return endpoint

    async def stop(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def _answer(self, verb: str) -> dict[str, object]:
        if verb == "PING":
            return {**self._identity, "type": f"{_TYPE}.ping_response"}
        if verb == "INFO":
            return {
                **self._identity,
                "type": f"{_TYPE}.info_response",
                "description": self._description,
                "endpoints": [endpoint.info() for endpoint in self._endpoints],
            }
        return {
            **self._identity,
            "type": f"{_TYPE}.stats_response",
            "started": self._started.isoformat().replace("+00:00", "Z"),
            "endpoints": [endpoint.stats() for endpoint in self._endpoints],
        }
