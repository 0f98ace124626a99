"""Being able to see why: one request's spans, in the local store and at a collector."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon.tracing import attributes, names
from halfmoon.tracing.store import TraceStore
from support.otlp import Collector
from support.system import System, clean_environ
from support.wait import until_blocking

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
EXPECTED = {
    names.GATEWAY_REQUEST,
    names.CONDUCTOR_SCHEDULE,
    names.PREFILL_REQUEST,
    names.PREFILL_QUEUE,
    names.PREFILL_COMPUTE,
    names.DECODE_REQUEST,
    names.DECODE_WAIT_KV,
    names.DECODE_GENERATE,
    names.CHUNK,
}


def ask(system: System, prompt: str) -> str:
    headers = {"authorization": "Bearer sk-alpha"}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{system.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def span_names(system: System, request_id: str) -> set[str]:
    with TraceStore(system.data_dir / "traces.db") as store:
        return {span.name for span in store.spans_of_request(request_id)}


@pytest.mark.parametrize("name", ["shm_system", "tcp_system"])
def test_every_chunk_of_a_request_is_told(name: str, request: pytest.FixtureRequest) -> None:
    system: System = request.getfixturevalue(name)
    prompt = f"Quicksilver {name} trace. " + "The tide turned at the harbour wall. " * 22
    request_id = ask(system, prompt)
    until_blocking(lambda: span_names(system, request_id) >= EXPECTED, 15, what="all spans are stored")
    with TraceStore(system.data_dir / "traces.db") as store:
        spans = store.spans_of_request(request_id)
    assert len({span.trace_id for span in spans}) == 1
    root = next(span for span in spans if span.name == names.GATEWAY_REQUEST)
    assert [event.name for event in root.events].count(names.EVENT_FIRST_TOKEN) == 1
    computed = [span for span in spans if span.attributes.get(attributes.CHUNK_OUTCOME) == "computed"]
    moved = [span for span in spans if span.name == names.CHUNK and span.attributes.get(attributes.CHUNK_SOURCE)]
    assert computed
    assert {span.attributes[attributes.REQUEST_ID] for span in computed} == {request_id}
    transports = {span.attributes.get(attributes.CHUNK_TRANSPORT) for span in moved}
    assert name.removesuffix("_system") in transports or transports <= {None}
    # Prompt text is nowhere, in no span of any service.
    raw = b"".join(path.read_bytes() for path in system.data_dir.glob("traces.db*"))
    assert b"Quicksilver" not in raw
    assert b"harbour wall" not in raw


def test_the_command_prints_the_waterfall(shm_system: System) -> None:
    request_id = ask(shm_system, "Night falls over the bay, and lamps are lit. " * 20)
    until_blocking(lambda: span_names(shm_system, request_id) >= EXPECTED, 15, what="all spans are stored")
    done = trace(shm_system.data_dir, request_id)
    assert done.returncode == 0
    for word in (request_id, "TTFT", "queue", "compute", "chunk 0", "computed", "first token", "decode"):
        assert word in done.stdout, word


def test_a_collector_gets_every_service_of_a_request(model: Path, tmp_path: Path) -> None:
    collector = Collector()
    try:
        system = System.start(
            tmp_path / "data",
            model,
            "--engine=sim",
            "--arena-mib=16",
            "--chunk-tokens=64",
            environ={"HALFMOON_OTLP_ENDPOINT": collector.url},
        )
        try:
            request_id = ask(system, "moon " * 100)
            wanted = {"gateway", "conductor", "prefill", "decode", "kv_tier"}
            until_blocking(lambda: services_of(collector, request_id) >= wanted, 20, what="spans of every service")
        finally:
            assert system.stop() == 0
    finally:
        collector.close()


def services_of(collector: Collector, request_id: str) -> set[str]:
    """Services with spans in the trace of a request."""
    spans = [
        (resource.resource, span)
        for _, request in list(collector.requests)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]

    def of_request(pairs: Any) -> bool:
        return any(p.key == attributes.REQUEST_ID and p.value.string_value == request_id for p in pairs)

    traces = {span.trace_id for _, span in spans if of_request(span.attributes)}
    assert len(traces) <= 1
    return {
        pair.value.string_value
        for resource, span in spans
        if span.trace_id in traces
        for pair in resource.attributes
        if pair.key == "service.name"
    }


def test_an_unknown_request_is_said_to_be_unknown(shm_system: System, tmp_path: Path) -> None:
    done = trace(shm_system.data_dir, "req-nobody")
    assert done.returncode == 1
    assert "req-nobody isn't in" in done.stdout
    assert trace(tmp_path, "req-nobody").returncode == 1


def trace(data_dir: Path, request_id: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfmoon.cli.app", "trace", f"--data-dir={data_dir}", "--width=120", request_id],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=30,
    )
