"""The local span store: several real processes, bounds, damage, locks."""

import logging
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.tracing import Context, Telemetry, TelemetryConfig, link_to, setup, traceparent
from halfmoon.tracing import attributes as a
from halfmoon.tracing.record import EventRecord
from halfmoon.tracing.store import TraceStore, TraceStoreError

_WRITER = """
import sys
from pathlib import Path
from halfmoon.tracing import TelemetryConfig, setup

service, path, num_spans = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
telemetry = setup(service, TelemetryConfig(store_path=path, export_interval_s=0.001))
print("ready", flush=True)
sys.stdin.readline()
for index in range(num_spans):
    telemetry.tracer.record_span("chunk", index, index + 1, attributes={"halfmoon.request_id": service})
    if index % 50 == 0:
        telemetry.flush(5)
assert telemetry.shutdown(10)
stats = telemetry.stats()["store"]
assert (stats.exported, stats.failed, stats.dropped) == (num_spans, 0, 0), stats
"""


def _service(path: Path, max_spans: int = 1000) -> Telemetry:
    config = TelemetryConfig(store_path=path, store_max_spans=max_spans, node="node-a", export_interval_s=0.01)
    return setup("kv-tier", config)


def _record(telemetry: Telemetry, *request_ids: str) -> None:
    for request_id in request_ids:
        telemetry.tracer.record_span("gateway.request", 1, 2, parent=Context(), attributes={a.REQUEST_ID: request_id})
    assert telemetry.flush(5)


def test_spans_come_back_whole_by_request(tmp_path: Path) -> None:
    path = tmp_path / "data" / "traces.db"
    telemetry = _service(path)
    tracer = telemetry.tracer
    with tracer.span("gateway.request", attributes={a.REQUEST_ID: "req-1", a.TTFT_MS: 12.5}) as root:
        root.add_event("first_token", timestamp=77)
        kept = traceparent()
        with tracer.span("prefill.request", attributes={a.GEN_AI_RESPONSE_FINISH_REASONS: ["stop"]}):
            pass
    tracer.record_span("kvtier.evict", 10, 20, parent=Context(), links=link_to(kept))
    with tracer.span("gateway.request", attributes={a.REQUEST_ID: "req-2"}):
        pass
    assert telemetry.shutdown()
    with TraceStore(path) as store:
        spans = {span.name: span for span in store.spans_of_request("req-1")}
        assert len(spans) == 3
        assert store.spans_of_request("req-3") == []
        assert [found.name for found in store.spans_of_request("req-2")] == ["gateway.request"]
        recent = {found.request_id: found.num_spans for found in store.recent_requests()}
        assert recent == {"req-1": 1, "req-2": 1}
        trace = store.spans_of_trace(spans["gateway.request"].trace_id)
        assert [span.name for span in trace] == ["gateway.request", "prefill.request"]
    request, prefill, evict = spans["gateway.request"], spans["prefill.request"], spans["kvtier.evict"]
    assert request.attributes == {a.REQUEST_ID: "req-1", a.TTFT_MS: 12.5}
    assert request.events == (EventRecord(name="first_token", time_ns=77),)
    assert (request.service, request.node) == ("kv-tier", "node-a")
    assert prefill.parent_span_id == request.span_id
    assert prefill.attributes == {a.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",)}
    assert (evict.start_ns, evict.end_ns) == (10, 20)
    assert [(link.trace_id, link.span_id) for link in evict.links] == [(request.trace_id, request.span_id)]


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, f"service-{index}", str(path), "1500"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.communicate("go\n", timeout=40)
        assert [writer.returncode for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    with TraceStore(path) as store:
        assert store.num_spans() == 3000
        for index in range(2):
            spans = store.spans_of_request(f"service-{index}")
            assert [span.start_ns for span in spans] == list(range(1500))
            assert {span.service for span in spans} == {f"service-{index}"}


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    telemetry = _service(path)
    _record(telemetry, "req-1")
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} == {"traces.db", "traces.db-wal", "traces.db-shm"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert telemetry.shutdown()


def test_the_oldest_spans_go_first(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    telemetry = _service(path, max_spans=10)
    maker = Context()
    with telemetry.tracer.span("maker"):
        kept = traceparent()
    for index in range(25):
        telemetry.tracer.record_span(
            "kvtier.evict", index, index, parent=maker, links=link_to(kept), attributes={a.REQUEST_ID: f"req-{index}"}
        )
        assert telemetry.flush(5)
    assert telemetry.shutdown()
    with TraceStore(path) as store:
        assert store.num_spans() == 10
        assert [found.request_id for found in store.recent_requests(99)] == [f"req-{i}" for i in range(24, 14, -1)]
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM link").fetchone() == (10,)
    connection.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, and longer than a header" * 40, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_damaged_file_is_set_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traces.db"
    path.write_bytes(content)
    with pytest.raises(TraceStoreError, match="can't be read"), TraceStore(path) as store:
        store.spans_of_request("req-1")
    telemetry = _service(path)
    _record(telemetry, "req-1")
    assert telemetry.shutdown()
    (aside,) = tmp_path.glob("traces.db.damaged-*")
    assert aside.read_bytes() == content
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert aside.name in line.getMessage()
    with TraceStore(path) as store:
        assert len(store.spans_of_request("req-1")) == 1


def test_store_removed_under_a_running_service_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "traces.db"
    telemetry = _service(path)
    _record(telemetry, "req-1")
    for file in list(tmp_path.iterdir()):
        file.unlink()
    _record(telemetry, "req-2")
    assert telemetry.shutdown()
    with TraceStore(path) as store:
        assert [found.request_id for found in store.recent_requests()] == ["req-2"]


def test_lock_held_too_long_costs_the_batch_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traces.db"
    telemetry = _service(path)
    _record(telemetry, "req-1")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    telemetry.tracer.record_span("lost", 1, 2)
    assert telemetry.flush(10)
    holder.execute("ROLLBACK")
    holder.close()
    _record(telemetry, "req-2")
    assert telemetry.shutdown()
    stats = telemetry.stats()["store"]
    assert (stats.exported, stats.failed) == (2, 1)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "locked" in line.getMessage()


def test_unwritable_folder_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    telemetry = _service(tmp_path / "file" / "traces.db")
    _record(telemetry, "req-1")
    _record(telemetry, "req-2")
    assert telemetry.shutdown()
    assert telemetry.stats()["store"].failed == 2
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_another_format_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traces.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    telemetry = _service(path)
    _record(telemetry, "req-1")
    assert telemetry.shutdown()
    assert telemetry.stats()["store"].failed == 1
    assert "written by another halfmoon" in caplog.text
    assert not list(tmp_path.glob("*.damaged-*"))


def test_missing_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceStoreError, match="start a service with its trace store on"):
        TraceStore(tmp_path / "traces.db")
