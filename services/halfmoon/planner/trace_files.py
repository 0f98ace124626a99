"""Traces of requests, from three kinds of file; which one, its first line tells.

halfmoon record   JSON lines with a header, blocks of 64 tokens          docs/sizing.md
Mooncake          JSON lines, blocks of 512 tokens, the last partial     github.com/kvcache-ai/Mooncake
Azure             CSV of times and lengths, no blocks                    github.com/Azure/AzurePublicDataset
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from halfmoon.planner.recording import FORMAT, VERSION, AnyLine, EndLine, Header, ModelLine, RequestLine
from halfmoon.planner.traced import TracedRequest

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(Exception):
    """The file is no trace that can be read; the message names the file, the line, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    source: str
    """`halfmoon`, `Mooncake` or `Azure`."""
    requests: tuple[TracedRequest, ...]
    """In the order of their arrival."""
    block_tokens: int | None
    models: tuple[ModelLine, ...] = ()
    warnings: tuple[str, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: int
    input_length: int
    hash_ids: tuple[int, ...]


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_RECORDING: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def read_trace(path: Path, *, model: str | None = None) -> Trace:
    """`model`: only its requests, of a recording. Raises `TraceError`."""
    try:
        with path.open("rb") as stream:
            first = stream.readline()
            if not first.strip():
                raise TraceError(f"{path} is empty")
            stream.seek(0)
            if first.startswith(b"TIMESTAMP"):
                return _azure(path, (line.decode("utf-8", "replace") for line in stream))
            if b'"hash_ids"' in first:
                return _mooncake(path, stream)
            if b'"header"' in first:
                return _recording(path, stream, model)
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from None
    raise TraceError(
        f"{path}, line 1: neither a recording of `halfmoon record`, nor a trace in the format of Mooncake (JSON lines "
        f"with hash_ids) or Azure (CSV with {', '.join(_AZURE_COLUMNS)})"
    )


def _mooncake(path: Path, lines: Iterable[bytes]) -> Trace:
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = _MOONCAKE.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        expected = -(-read.input_length // MOONCAKE_BLOCK_TOKENS)
        if read.input_length < 0 or len(read.hash_ids) != expected:
            raise TraceError(
                f"{path}, line {number}: {len(read.hash_ids)} hash_ids for {read.input_length} tokens, "
                f"where blocks of {MOONCAKE_BLOCK_TOKENS} make {max(0, expected)}"
            )
        requests.append(TracedRequest(at_ms=read.timestamp, prompt_tokens=read.input_length, blocks=read.hash_ids))
    return _trace("Mooncake", path, requests, MOONCAKE_BLOCK_TOKENS)


def _recording(path: Path, lines: Iterable[bytes], model: str | None) -> Trace:
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
    requests = [
        TracedRequest(at_ms=each.at_ms, prompt_tokens=each.prompt_tokens, blocks=each.blocks, group=each.tenant)
        for each in found
        if model is None or each.model == model
    ]
    of_these = tuple(line for line in models.values() if line.name == (model or (names[0] if names else None)))
    return _trace("halfmoon", path, requests, header.block_tokens, models=of_these, warnings=tuple(warnings))


def _checked(path: Path, line: AnyLine) -> Header:
    if not isinstance(line, Header) or line.format != FORMAT:
        raise TraceError(f"{path}, line 1: expected the header of a recording, with the format {FORMAT}")
    if line.version != VERSION:
        raise TraceError(f"{path}: recordings of version {line.version} can't be read, only {VERSION}; update halfmoon")
    if line.block_tokens < 1:
        raise TraceError(f"{path}, line 1: blocks of {line.block_tokens} tokens can't be")
    return line


def _azure(path: Path, lines: Iterator[str]) -> Trace:
    rows = csv.reader(lines)
    if next(rows) != _AZURE_COLUMNS:
        raise TraceError(f"{path}, line 1: expected the columns {', '.join(_AZURE_COLUMNS)}")
    requests = []
    begin: datetime | None = None
    for row in rows:
        if not row:
            continue
        try:
            time_text, prompt_text, _ = row
            # Seven digits of a second's fraction, where Python reads six.
            at, prompt_tokens = datetime.fromisoformat(time_text[:26]), int(prompt_text)
        except ValueError:
            raise TraceError(
                f"{path}, line {rows.line_num}: expected a time and two numbers, found {','.join(row)[:80]!r}"
            ) from None
        begin = begin or at
        requests.append(TracedRequest(at_ms=int((at - begin).total_seconds() * 1000), prompt_tokens=prompt_tokens))
    return _trace("Azure", path, requests, None)


def _trace(
    source: str,
    path: Path,
    requests: list[TracedRequest],
    block_tokens: int | None,
    *,
    models: tuple[ModelLine, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Trace:
    if not any(request.prompt_tokens > 0 for request in requests):
        raise TraceError(f"{path} has no requests")
    ordered = tuple(sorted(requests, key=lambda request: request.at_ms))
    return Trace(source=source, requests=ordered, block_tokens=block_tokens, models=models, warnings=warnings)
