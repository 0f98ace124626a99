"""Prompts as operators give them: text files, JSON lines, and keys in hex."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from halfmoon.chunks.keys import KEY_BYTES
from halfmoon.schemas.ids import ChunkKey

_STDIN = Path("-")


class PromptFileError(Exception):
    """A file that holds no prompts; the message says where and why."""


class Prompt(msgspec.Struct, frozen=True):
    """One, in one of three forms. What else a line holds is passed over."""

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tokens: tuple[int, ...] | None = None


def read_prompts(path: Path, *, by_line: bool) -> list[Prompt]:
    """The prompts of a file: `.jsonl` has one a line, a text file too where `by_line`, else it is one. Empty lines are
    passed over. Raises `PromptFileError`."""
    try:
        text = sys.stdin.read() if path == _STDIN else path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptFileError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptFileError(f"{path} is no text in UTF-8") from None
    if path.suffix == ".jsonl":
        prompts = [_of_line(path, number, line) for number, line in _lines(text)]
    elif by_line:
        prompts = [Prompt(prompt=line) for _, line in _lines(text)]
    else:
        prompts = [Prompt(prompt=text.removesuffix("\n"))] if text.strip() else []
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return prompts


def read_keys(texts: Sequence[str]) -> tuple[ChunkKey, ...]:
    """Raises `PromptFileError`."""
    keys = []
    for text in texts:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise PromptFileError(f"{text!r} is no chunk key: expected {2 * KEY_BYTES} hex digits, as `cache ls` shows")
        keys.append(ChunkKey(key))
    return tuple(keys)


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _of_line(path: Path, number: int, line: str) -> Prompt:
    try:
        if line.lstrip().startswith("["):
            return Prompt(messages=msgspec.json.decode(line, type=tuple[dict[str, Any], ...]))
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.MsgspecError as error:
        raise PromptFileError(
            f"{path}, line {number}: {error}; expected chat messages, or an object with messages, prompt or tokens"
        ) from None
    if sum(each is not None for each in (prompt.prompt, prompt.messages, prompt.tokens)) != 1:
        raise PromptFileError(f"{path}, line {number}: give exactly one of messages, prompt and tokens")
    return prompt
