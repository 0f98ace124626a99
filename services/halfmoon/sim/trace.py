"""Reads Mooncake's published traces: one JSON object a line, a prompt's blocks as numbers.

https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. Each line has `timestamp` (ms), `input_length` (tokens),
`output_length` (tokens) and `hash_ids`: a number for each block of 512 tokens of the prompt, the same for the same
prefix. The last block may be partly filled.
"""

import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TracePrompt:
    at_ns: int
    blocks: tuple[int, ...]
    """Different from each other."""
    last_is_full: bool


class TraceError(Exception):
    """A trace that can't be read: which, where, and what was expected."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    hash_ids: list[int]


def read_mooncake(path: Path) -> list[TracePrompt]:
    """The trace's prompts in their order; empty lines are skipped, a file named `.xz` is unpacked.

    Raises `TraceError`.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            prompts = _prompts(lines, path)
    except OSError as error:
        raise TraceError(f"can't read the trace {path}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError) as error:
        raise TraceError(f"can't unpack the trace {path}: {error}; expected an .xz file") from None
    if not prompts:
        raise TraceError(f"{path} holds no prompts: expected one JSON object a line, as in Mooncake's traces")
    return prompts


def _prompts(lines: Iterable[bytes], path: Path) -> list[TracePrompt]:
    decoder = msgspec.json.Decoder(_Line)
    prompts: list[TracePrompt] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            where = f"{path}, line {number}"
            prompt = _prompt(text, decoder, where)
            if prompts and prompt.at_ns < prompts[-1].at_ns:
                raise TraceError(f"{where}: its timestamp is earlier than the line before; sort the trace by time")
            prompts.append(prompt)
    return prompts


def _prompt(text: bytes, decoder: "msgspec.json.Decoder[_Line]", where: str) -> TracePrompt:
    expected = 'expected {"timestamp": ms, "input_length": tokens, "hash_ids": [numbers], …}'
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}; {expected}") from None
    if line.timestamp < 0:
        raise TraceError(f"{where}: timestamp is {line.timestamp}; {expected}, timestamp ≥ 0")
    num_blocks = len(line.hash_ids)
    if num_blocks != -(-line.input_length // BLOCK_TOKENS):
        raise TraceError(
            f"{where}: {num_blocks} hash_ids for {line.input_length} tokens; expected one per {BLOCK_TOKENS} tokens"
        )
    if len(set(line.hash_ids)) != num_blocks:
        raise TraceError(f"{where}: a number is twice in hash_ids; expected one per prefix, so all different")
    return TracePrompt(
        at_ns=round(line.timestamp * 1_000_000),
        blocks=tuple(line.hash_ids),
        last_is_full=line.input_length % BLOCK_TOKENS == 0,
    )
