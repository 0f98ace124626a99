"""The local span store: one SQLite file per host, written by every service on it, read by `halfmoon trace`.

Many processes write: WAL mode, one short transaction per batch, a bounded wait for the lock. The file is bounded by a
number of spans; the oldest go. A store that can't be written costs spans, never a request.
"""

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from halfmoon.tracing.record import SpanRecord, record_of

_BUSY_TIMEOUT_S = 2.0
_FORMAT_VERSION = 1

# `span.id` only grows and has no gaps below its maximum except where the oldest were removed: so `max(id)` minus the
# bound tells exactly what to remove.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS span (
    id INTEGER PRIMARY KEY,
    trace_id TEXT NOT NULL,
    request_id TEXT,
    start_ns INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS span_by_trace ON span (trace_id);
CREATE INDEX IF NOT EXISTS span_by_request ON span (request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS link (span INTEGER NOT NULL, trace_id TEXT NOT NULL, PRIMARY KEY (trace_id, span))
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS link_by_span ON link (span);
"""

_log = logging.getLogger(__name__)


class TraceStoreError(Exception):
    """The store at `path` can't be used; `reason` says why and what to do."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"trace store {path}: {reason}")
        self.path = path
        self.reason = reason


class SQLiteExporter(SpanExporter):
    """Writes spans to the file at `path`, which is created (mode 0600) when the first batch comes.

    A file that is no database, or a damaged one, is renamed aside with a warning and begun anew.
    """

    def __init__(self, path: Path, max_spans: int = 200_000) -> None:
        self.path = path
        self._max_spans = max_spans
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._failing = False
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        records = [record_of(span) for span in spans]
        with self._lock:
            if self._closed:
                return SpanExportResult.FAILURE
            try:
                try:
                    self._write(records)
                except sqlite3.DatabaseError as error:
                    self._disconnect()
                    if not _is_damage(error):
                        raise
                    _set_aside(self.path, error)
                    self._write(records)
            except (sqlite3.Error, OSError) as error:
                self._disconnect()
                if not self._failing:
                    self._failing = True
                    _log.warning(
                        "spans can't be written to the trace store %s (%s); they are counted as failed until it can. "
                        "Check that its folder exists, is writable and has space",
                        self.path,
                        error,
                    )
                return SpanExportResult.FAILURE
            self._failing = False
            return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """True: nothing is kept here."""
        return True

    def shutdown(self) -> None:
        """Close the file. Idempotent; a batch being written is waited for (bounded by the busy timeout)."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _write(self, records: Sequence[SpanRecord]) -> None:
        connection = self._connect()
        with _transaction(connection):
            for record in records:
                cursor = connection.execute(
                    "INSERT INTO span (trace_id, request_id, start_ns, record) VALUES (?, ?, ?, ?)",
                    (record.trace_id, record.request_id, record.start_ns, msgspec.msgpack.encode(record)),
                )
                connection.executemany(
                    "INSERT OR IGNORE INTO link (span, trace_id) VALUES (?, ?)",
                    [(cursor.lastrowid, link.trace_id) for link in record.links],
                )
            (newest,) = connection.execute("SELECT max(id) FROM span").fetchone()
            connection.execute("DELETE FROM span WHERE id <= ?", (newest - self._max_spans,))
            connection.execute("DELETE FROM link WHERE span <= ?", (newest - self._max_spans,))

    def _connect(self) -> sqlite3.Connection:
        """The open connection; a new one when the file was removed or replaced under it."""
        if self._connection is not None:
            if _inode(self.path) == self._inode:
                return self._connection
            self._disconnect()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite gives its -wal and -shm files the mode of the main one.
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._connection = _open(f"{self.path.absolute().as_uri()}?mode=rw")
        self._inode = _inode(self.path) or 0
        _prepare(self._connection)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(frozen=True, slots=True)
class StoredRequest:
    request_id: str
    start_ns: int
    num_spans: int


class TraceStore:
    """Reads the store. A context manager; opens nothing for writing.

    Raises `TraceStoreError` when the file is missing, or is no store of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise TraceStoreError(path, "there is no such file; start a service with its trace store on, and try again")
        with self._reading():
            self._connection = _open(f"{path.absolute().as_uri()}?mode=ro")

    def __enter__(self) -> "TraceStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def spans_of_request(self, request_id: str) -> list[SpanRecord]:
        """All spans of the traces in which the request appears, and those that link to them (a chunk's later life),
        by start time. Empty when it is unknown (never seen, sampled out, or old and removed)."""
        query = """
            WITH traces AS (SELECT DISTINCT trace_id FROM span WHERE request_id = :request_id)
            SELECT record FROM span
            WHERE trace_id IN traces OR id IN (SELECT span FROM link WHERE trace_id IN traces)
            ORDER BY start_ns, id
        """
        return self._records(query, {"request_id": request_id})

    def spans_of_trace(self, trace_id: str) -> list[SpanRecord]:
        return self._records(
            "SELECT record FROM span WHERE trace_id = :trace_id ORDER BY start_ns, id", {"trace_id": trace_id}
        )

    def recent_requests(self, limit: int = 20) -> list[StoredRequest]:
        """The requests that were last begun, newest first."""
        query = """
            SELECT request_id, min(start_ns) AS began, count(*) FROM span WHERE request_id IS NOT NULL
            GROUP BY request_id ORDER BY began DESC LIMIT ?
        """
        with self._reading():
            return [StoredRequest(*row) for row in self._connection.execute(query, (limit,))]

    def num_spans(self) -> int:
        with self._reading():
            (count,) = self._connection.execute("SELECT count(*) FROM span").fetchone()
        return int(count)

    def _records(self, query: str, parameters: dict[str, str]) -> list[SpanRecord]:
        with self._reading():
            rows = self._connection.execute(query, parameters).fetchall()
            return [msgspec.msgpack.decode(row[0], type=SpanRecord) for row in rows]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise TraceStoreError(
                self.path, f"it can't be read ({error}); if it is no trace store of this version, remove it"
            ) from error


def _open(uri: str) -> sqlite3.Connection:
    # Autocommit: transactions are begun by hand, so that each is IMMEDIATE and none stays open by accident.
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _prepare(connection: sqlite3.Connection) -> None:
    # The switch to WAL does not wait for a busy lock, so two processes that start together need a few tries.
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, _FORMAT_VERSION):
        raise sqlite3.DatabaseError(
            f"format version {version} is not {_FORMAT_VERSION}: written by another halfmoon; move the file away"
        )
    if version == 0:
        with _transaction(connection):
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT_VERSION}")


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path, error: sqlite3.DatabaseError) -> None:
    """Rename a damaged file, unless another process has done so and begun a sound one."""
    with open(path.with_name(path.name + ".lock"), "a") as lock:
        os.chmod(lock.fileno(), 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or _is_sound(path):
            return
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        os.replace(path, aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    _log.warning(
        "the trace store %s is damaged (%s); it was renamed to %s and a new one begun. Remove the old one when you "
        "don't need it",
        path,
        error,
        aside.name,
    )


def _is_sound(path: Path) -> bool:
    connection = _open(f"{path.absolute().as_uri()}?mode=ro")
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return not _is_damage(error)
    finally:
        connection.close()
    return bool(verdict == "ok")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
