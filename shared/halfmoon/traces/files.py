"""Trace files of three kinds, plain or `.xz`; which one, the first line tells.

halfmoon record   JSON lines with a header, blocks of 64 tokens          docs/sizing.md
Mooncake          JSON lines, blocks of 512 tokens, the last partial     github.com/kvcache-ai/Mooncake
Azure             CSV of times and lengths, no blocks                    github.com/Azure/AzurePublicDataset

`read_trace` gives the whole of a file. `open_trace` gives its requests one by one, so that a file may be larger than
memory; recordings alone are read whole, as their lines aren't sorted.
"""

import csv
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec

from halfmoon.traces.recording import FORMAT, VERSION, AnyLine, EndLine, Header, ModelLine, RequestLine
from halfmoon.traces.request import TracedRequest

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

Source = Literal["halfmoon", "Mooncake", "Azure"]


class TraceError(Exception):
    """The file is no trace that can be read; the message names the file, the line, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrace:
    source: Source
    requests: Iterator[TracedRequest]
    """As the file has them. Taking the next may raise `TraceError`."""
    block_tokens: int | None
    """None: the trace doesn't know blocks."""
    models: tuple[ModelLine, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    source: Source
    requests: tuple[TracedRequest, ...]
    """In the order of their arrival."""
    block_tokens: int | None
    models: tuple[ModelLine, ...] = ()
    warnings: tuple[str, ...] = ()


def read_trace(path: Path, *, model: str | None = None) -> Trace:
    """The whole of a trace, sorted. `model`: only its requests, of a recording. Raises `TraceError`."""
    found = open_trace(path, model=model, is_sorted=False)
    requests = tuple(sorted(found.requests, key=lambda request: request.at_ms))
    if not any(request.prompt_tokens > 0 for request in requests):
        raise TraceError(f"{path} has no requests")
    return Trace(
        source=found.source,
        requests=requests,
        block_tokens=found.block_tokens,
        models=found.models,
        warnings=found.warnings,
    )


def open_trace(path: Path, *, model: str | None = None, is_sorted: bool = True) -> OpenTrace:
    """The requests of a trace, one by one. `model`: only its requests, of a recording.

    Where `is_sorted`, a request that came before the one in front of it is an error. Raises `TraceError`.
    """
    lines = _lines(path)
    first = next(lines, b"")
    if not first.strip():
        raise TraceError(f"{path} is empty: expected a line for each request")
    lines = chain((first,), lines)
    if first.startswith(b"TIMESTAMP"):
        azure = _azure(path, (line.decode("utf-8", "replace") for line in lines), is_sorted)
        return OpenTrace(source="Azure", requests=azure, block_tokens=None)
    if b'"hash_ids"' in first:
        requests = _mooncake(path, lines, is_sorted)
        return OpenTrace(source="Mooncake", requests=requests, block_tokens=MOONCAKE_BLOCK_TOKENS)
    if b'"header"' in first:
        return _recording(path, lines, model)
    raise TraceError(
        f"{path}, line 1: neither a recording of `halfmoon record`, nor a trace in the format of Mooncake (JSON lines "
        f"with hash_ids) or Azure (CSV with {', '.join(_AZURE_COLUMNS)})"
    )


def num_lines_of(path: Path) -> int:
    """About as many as it has requests. Raises `TraceError`."""
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            yield from stream
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path} can't be unpacked: {error}; expected an .xz file") from None
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror or error}") from None


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    """ms"""
    input_length: int
    hash_ids: tuple[int, ...]
    output_length: int | None = None


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_RECORDING: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def _mooncake(path: Path, lines: Iterable[bytes], is_sorted: bool) -> Iterator[TracedRequest]:
    before_ms = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            read = _MOONCAKE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(
                f'{where}: {error}; expected {{"timestamp": ms, "input_length": tokens, "hash_ids": [numbers], …}}'
            ) from None
        expected = -(-read.input_length // MOONCAKE_BLOCK_TOKENS)
        if read.input_length < 0 or len(read.hash_ids) != expected:
            raise TraceError(
                f"{where}: {len(read.hash_ids)} hash_ids for {read.input_length} tokens, "
                f"where blocks of {MOONCAKE_BLOCK_TOKENS} make {max(0, expected)}"
            )
        if len(set(read.hash_ids)) != expected:
            raise TraceError(f"{where}: a number is twice in hash_ids; expected one per prefix, so all different")
        if read.timestamp < 0:
            raise TraceError(f"{where}: timestamp is {read.timestamp}; expected timestamp ≥ 0")
        if is_sorted and read.timestamp < before_ms:
            raise TraceError(f"{where}: its timestamp is earlier than the line before; sort the trace by time")
        before_ms = read.timestamp
        yield TracedRequest(
            at_ms=read.timestamp,
            prompt_tokens=read.input_length,
            completion_tokens=read.output_length,
            blocks=read.hash_ids,
        )


def _azure(path: Path, lines: Iterator[str], is_sorted: bool) -> Iterator[TracedRequest]:
    rows = csv.reader(lines)
    if next(rows) != _AZURE_COLUMNS:
        raise TraceError(f"{path}, line 1: expected the columns {', '.join(_AZURE_COLUMNS)}")
    begin: datetime | None = None
    before = datetime.min
    for row in rows:
        if not row:
            continue
        where = f"{path}, line {rows.line_num}"
        try:
            time_text, prompt_text, completion_text = row
            # Seven digits of a second's fraction, where Python reads six.
            at = datetime.fromisoformat(time_text[:26])
            prompt_tokens, completion_tokens = int(prompt_text), int(completion_text)
        except ValueError:
            raise TraceError(f"{where}: expected a time and two numbers, found {','.join(row)[:80]!r}") from None
        if is_sorted and at < before:
            raise TraceError(f"{where}: its time is earlier than the line before; sort the trace by time")
        begin, before = begin or at, at
        yield TracedRequest(
            at_ms=(at - begin).total_seconds() * 1000,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )


def _recording(path: Path, lines: Iterable[bytes], model: str | None) -> OpenTrace:
    header: Header | None = None
    models: dict[str, ModelLine] = {}
    found: list[RequestLine] = []
    warnings: list[str] = []
    has_ended = False
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            warnings.append(f"line {number} is cut short, and was skipped")
            break
        try:
            read = _RECORDING.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        if header is None:
            header = _checked(path, read)
            continue
        match read:
            case RequestLine():
                found.append(read)
            case ModelLine():
                models[read.name] = read
            case EndLine():
                has_ended = True
                if read.num_missed_messages or read.num_disconnects:
                    warnings.append(
                        f"{read.num_missed_messages} messages were missed while recording, and the connection was lost "
                        f"{read.num_disconnects} times: some requests aren't in it"
                    )
            case Header():
                raise TraceError(
                    f"{path}, line {number}: a second header; recordings can't be joined, their keys differ"
                )
    if header is None:
        raise TraceError(f"{path} has no whole line")
    if not has_ended:
        warnings.append("the recording was broken off; what it has is used")
    names = sorted({request.model for request in found})
    if model is None and len(names) > 1:
        raise TraceError(f"{path} has requests for several models: choose one with --only: {', '.join(names)}")
    if model is not None and found and model not in names:
        raise TraceError(f"{path} has no requests for {model}; it has {', '.join(names)}")
    requests = (
        TracedRequest(
            at_ms=each.at_ms,
            prompt_tokens=each.prompt_tokens,
            completion_tokens=each.completion_tokens,
            blocks=each.blocks,
            group=each.tenant,
        )
        for each in sorted(found, key=lambda each: each.at_ms)
        if model is None or each.model == model
    )
    of_these = tuple(line for line in models.values() if line.name == (model or (names[0] if names else None)))
    return OpenTrace(
        source="halfmoon",
        requests=requests,
        block_tokens=header.block_tokens,
        models=of_these,
        warnings=tuple(warnings),
    )


def _checked(path: Path, line: AnyLine) -> Header:
    if not isinstance(line, Header) or line.format != FORMAT:
        raise TraceError(f"{path}, line 1: expected the header of a recording, with the format {FORMAT}")
    if line.version != VERSION:
        raise TraceError(f"{path}: recordings of version {line.version} can't be read, only {VERSION}; update halfmoon")
    if line.block_tokens < 1:
        raise TraceError(f"{path}, line 1: blocks of {line.block_tokens} tokens can't be")
    return line
