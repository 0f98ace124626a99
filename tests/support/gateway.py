"""A gateway on real HTTP, with a scripted cluster behind it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon.bus.memory import MemoryBroker, MemoryBus
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.service import Gateway
from halfmoon.lifecycle import Runtime
from halfmoon.schemas.ids import WorkerId
from halfmoon.tracing import setup
from halfmoon.tracing.metrics import Metrics
from support.fake_cluster import MODEL, FakeCluster, Script
from support.wait import until


@dataclass(slots=True)
class Stand:
    """What a test of the gateway holds."""

    gateway: Gateway
    cluster: FakeCluster
    http: httpx.AsyncClient
    exporter: InMemorySpanExporter
    runtime: Runtime[GatewayConfig]
    failures: list[str]

    async def chat(self, **parameters: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | parameters
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **parameters: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 100} | parameters
        return await self.http.post("/v1/completions", json=body)

    async def spans(self, name: str) -> list[ReadableSpan]:
        await asyncio.to_thread(self.runtime.telemetry.flush)
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.metrics.registry.get_sample_value(name, labels) or 0.0


async def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` as it is. Fails for anything that is no event."""
    found: list[Any] = []
    async for line in response.aiter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        found.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return found


@asynccontextmanager
async def standing(
    model: Path | None, script: Script, *, cluster_up: bool = True, port: int = 0, **settings: Any
) -> AsyncIterator[Stand]:
    """A started gateway; stopped, with everything that it holds, at the end."""
    broker = MemoryBroker()
    bus, other = MemoryBus(broker), MemoryBus(broker)
    exporter = InMemorySpanExporter()
    telemetry = setup("gateway", exporters={"memory": exporter})
    failures: list[str] = []
    runtime = Runtime(
        service="gateway",
        worker_id=WorkerId("gateway-1"),
        config=GatewayConfig(model=model, model_name=MODEL, port=port, probe_interval_s=0.05, **settings),
        bus=bus,
        telemetry=telemetry,
        metrics=Metrics(),
        log=structlog.stdlib.get_logger("gateway"),
        started_ns=time.time_ns(),
        fail=failures.append,
    )
    cluster = FakeCluster(other, script)
    gateway = Gateway(runtime)
    try:
        await gateway.start()
        if cluster_up:
            await cluster.start()
            await _heard(gateway)
        async with httpx.AsyncClient(base_url=gateway.address, timeout=20.0) as http:
            yield Stand(gateway, cluster, http, exporter, runtime, failures)
    finally:
        await gateway.stop()
        await cluster.stop()
        await telemetry.aclose()
        await asyncio.gather(bus.close(), other.close())
    assert failures == []


async def _heard(gateway: Gateway) -> None:
    await until(lambda: not gateway._cluster.serving(MODEL).missing)
