"""Spans: explicit times, errors, attributes, sampling."""

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from halfmoon.schemas.chunks import ChunkOutcome
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from halfmoon.tracing import Context, Telemetry, TelemetryConfig, inject, record_error, setup
from halfmoon.tracing import attributes as a
from halfmoon.tracing.attributes import ChunkFacts
from halfmoon.tracing.record import SpanRecord, record_of


def _telemetry(sample_ratio: float = 1.0) -> tuple[Telemetry, InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    config = TelemetryConfig(sample_ratio=sample_ratio, node="node-a", worker="prefill-0", export_interval_s=0.01)
    return setup("prefill", config, exporters={"memory": memory}), memory


def _records(telemetry: Telemetry, memory: InMemorySpanExporter) -> dict[str, SpanRecord]:
    assert telemetry.shutdown()
    return {span.name: record_of(span) for span in memory.get_finished_spans()}


def test_recorded_span_has_the_times_and_facts_given() -> None:
    telemetry, memory = _telemetry()
    facts = ChunkFacts(
        request_id=RequestId("req-1"),
        key=ChunkKey(bytes(range(32))),
        index=3,
        outcome=ChunkOutcome.HIT_REMOTE,
        tier="dram",
        num_bytes=1_474_560,
        num_tokens=256,
        source=NodeId("node-b"),
        destination=NodeId("node-a"),
        transport="tcp",
        queue_wait_ms=0.5,
        transfer_ms=12.0,
    )
    with telemetry.tracer.span("prefill.acquire", kind=SpanKind.CONSUMER):
        telemetry.tracer.record_span("chunk", 1_000, 13_000, attributes=facts.attributes())
    records = _records(telemetry, memory)
    chunk, acquire = records["chunk"], records["prefill.acquire"]
    assert (chunk.start_ns, chunk.end_ns) == (1_000, 13_000)
    assert chunk.parent_span_id == acquire.span_id
    assert chunk.request_id == "req-1"
    assert acquire.kind == "consumer"
    assert (chunk.service, chunk.node, chunk.worker) == ("prefill", "node-a", "prefill-0")
    assert chunk.attributes == {
        "halfmoon.request_id": "req-1",
        "halfmoon.chunk.key": bytes(range(32)).hex(),
        "halfmoon.chunk.index": 3,
        "halfmoon.chunk.outcome": "hit_remote",
        "halfmoon.chunk.tier": "dram",
        "halfmoon.chunk.bytes": 1_474_560,
        "halfmoon.chunk.tokens": 256,
        "halfmoon.chunk.source": "node-b",
        "halfmoon.chunk.destination": "node-a",
        "halfmoon.chunk.transport": "tcp",
        "halfmoon.chunk.queue_wait_ms": 0.5,
        "halfmoon.chunk.transfer_ms": 12.0,
    }


def test_unknown_facts_are_left_out() -> None:
    assert ChunkFacts(index=0).attributes() == {"halfmoon.chunk.index": 0}


def test_end_never_comes_before_start() -> None:
    telemetry, memory = _telemetry()
    telemetry.tracer.record_span("chunk", 2_000, 1_500)
    assert _records(telemetry, memory)["chunk"].end_ns == 2_000


def test_exception_is_recorded_as_status_and_goes_on() -> None:
    telemetry, memory = _telemetry()
    with pytest.raises(ValueError, match="lease gone"), telemetry.tracer.span("kvtier.transfer"):
        raise ValueError("lease gone")
    telemetry.tracer.record_span("chunk", 1, 2, error=TimeoutError())
    with telemetry.tracer.span("prefill.request") as span:
        record_error(span, "no free slots", "no_space")
    records = _records(telemetry, memory)
    found = {name: (r.status, r.status_message, r.attributes[a.ERROR_TYPE]) for name, r in records.items()}
    assert found == {
        "kvtier.transfer": ("error", "ValueError: lease gone", "ValueError"),
        "chunk": ("error", "TimeoutError", "TimeoutError"),
        "prefill.request": ("error", "no_space: no free slots", "no_space"),
    }
    assert all(record.events == () for record in records.values())


def test_long_error_messages_are_cut() -> None:
    telemetry, memory = _telemetry()
    telemetry.tracer.record_span("chunk", 1, 2, error=ValueError("x" * 10_000))
    assert len(_records(telemetry, memory)["chunk"].status_message) == len("ValueError: ") + 500


async def test_cancelled_span_ends_and_says_so() -> None:
    telemetry, memory = _telemetry()
    entered = asyncio.Event()

    async def wait() -> None:
        with telemetry.tracer.span("decode.generate"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.wait_for(entered.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _records(telemetry, memory)["decode.generate"].status_message == "CancelledError"


def test_sampling_is_decided_at_the_root_and_followed_by_children() -> None:
    unsampled, unsampled_memory = _telemetry(sample_ratio=0.0)
    sampling, sampling_memory = _telemetry(sample_ratio=1.0)
    headers: dict[str, str] = {}
    with unsampled.tracer.span("root", parent=Context()):
        inject(headers)
        with sampling.tracer.span("child of an unsampled root"):
            pass
    assert headers["traceparent"].split("-")[3] in ("00", "02")
    assert _records(unsampled, unsampled_memory) == {}
    assert _records(sampling, sampling_memory) == {}


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="sample_ratio is a share from 0"):
        TelemetryConfig(sample_ratio=1.5)
    with pytest.raises(ValueError, match="leave store_path out"):
        TelemetryConfig(store_max_spans=0)


def test_spans_after_shutdown_are_counted_and_harmless() -> None:
    telemetry, memory = _telemetry()
    assert telemetry.shutdown()
    assert telemetry.shutdown()
    with telemetry.tracer.span("late"):
        pass
    assert memory.get_finished_spans() == ()
    assert telemetry.stats()["memory"].dropped == 1


async def test_async_owner_closes_on_exit() -> None:
    telemetry, memory = _telemetry()
    async with telemetry:
        with telemetry.tracer.span("work"):
            pass
    assert [span.name for span in memory.get_finished_spans()] == ["work"]
