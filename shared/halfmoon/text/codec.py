"""A model's tokenizer and chat template.

Loaded through transformers, so that a prompt becomes what the model was published with; but without torch, which a
gateway has no use for. Encoding and decoding go to the `tokenizers` backend itself: it is safe to call from
several threads, while transformers' wrapper changes the backend's settings on each call.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from halfmoon.text.detokenizer import Detokenizer
from halfmoon.text.errors import TextError, TokenizerUnusable
from halfmoon.text.gguf import converted_gguf

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...


class _Backend(Protocol):
    """What we use of `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self) -> int: ...

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    @property
    def decoder(self) -> object: ...


class _Template(Protocol):
    """What we use of transformers' tokenizer."""

    chat_template: str | Mapping[str, str] | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


class TextCodec:
    """Text to tokens and back, for one model. Built by `load`; immutable, and safe to use from several threads."""

    def __init__(self, backend: _Backend, template: _Template, eos_tokens: frozenset[int]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self.eos_tokens = eos_tokens
        """End-of-sequence ids: generation ends at any of them."""
        self.vocab_size = backend.get_vocab_size()
        self._byte_alphabet = _byte_alphabet() if "ByteLevel" in repr(backend.decoder) else None

    @classmethod
    def load(cls, model_path: Path) -> "TextCodec":
        """From a Hugging Face folder with a `tokenizer.json`, or a GGUF file. Raises `TokenizerUnusable`.

        Blocks: about 0.8 s, most of it the import of transformers; a GGUF file takes about 5 s.
        """
        if model_path.is_file():
            with converted_gguf(model_path) as folder:
                return cls._from_folder(folder)
        return cls._from_folder(model_path)

    @classmethod
    def _from_folder(cls, folder: Path) -> "TextCodec":
        if not folder.is_dir():
            raise TokenizerUnusable(f"{folder}: no such folder; give a Hugging Face model folder, or a GGUF file")
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerUnusable(
                f"{folder}: has no tokenizer.json; write one with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        # Here and not above: it takes 0.6 s, and many who import this module never load a model.
        from transformers import PreTrainedTokenizerFast

        try:
            # Not AutoTokenizer, which imports torch to look for the model's class.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            # The libraries beneath raise whatever they like at a damaged file, bare Exception included.
            raise TokenizerUnusable(f"{folder}: the tokenizer can't be loaded: {error}") from error
        eos = _eos_tokens(folder)
        if tokenizer.eos_token_id is not None:
            eos.add(int(tokenizer.eos_token_id))
        return cls(cast("_Backend", tokenizer.backend_tokenizer), cast("_Template", tokenizer), frozenset(eos))

    def encode(self, text: str) -> list[int]:
        """The text's tokens, with what the model puts before every text (a begin-of-sequence token, for some)."""
        return self._backend.encode(_encodable(text), add_special_tokens=True).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant's answer.

        `content` is a string or a list of `{"type": "text", "text": …}` parts. Raises `TextError`, which names
        the message.
        """
        if not self._template.chat_template:
            raise TextError("this model has no chat template; use completions with a prompt instead")
        if not messages:
            raise TextError("messages must not be empty")
        conversation = [_plain_message(index, message) for index, message in enumerate(messages)]
        try:
            text = self._template.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is the model's own program: it refuses by raising, and may fail in any way.
            raise TextError(f"the model's chat template refuses these messages: {error}") from error
        return self._backend.encode(_encodable(text), add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The token alone: U+FFFD where it holds a part of a character. Empty for an id the tokenizer doesn't know."""
        return self._backend.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes: exact also where it holds a part of a character."""
        raw = self._backend.id_to_token(token)
        if raw is None:
            return b""
        if found := _BYTE_TOKEN.fullmatch(raw):
            return bytes.fromhex(found[1])
        if self._byte_alphabet is not None and all(letter in self._byte_alphabet for letter in raw):
            return bytes(self._byte_alphabet[letter] for letter in raw)
        return self.token_text(token).encode()

    def detokenizer(self, prompt_tokens: Sequence[int] = ()) -> Detokenizer:
        """A fresh one, for the completion of this prompt."""
        return Detokenizer(self.decode, prompt_tokens)


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise TextError(f"messages[{index}].role must be a string such as 'system', 'user' or 'assistant'")
    # The API's newer name for what every template calls system.
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise TextError(f"messages[{index}].content must be a string or a list of text parts")
    texts: list[str] = []
    for place, part in enumerate(content):
        where = f"messages[{index}].content[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            raise TextError(f"{where} has type {kind!r}; only 'text' parts are supported")
        if not isinstance(part.get("text"), str):
            raise TextError(f"{where}.text must be a string")
        texts.append(part["text"])
    return {"role": role, "content": "".join(texts)}


def _encodable(text: str) -> str:
    """JSON may hold half a surrogate pair, which is no text and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"the text holds a lone surrogate at character {error.start}, which is no Unicode") from None
    return text


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _eos_tokens(folder: Path) -> set[int]:
    """What the model's own files say: chat models often end a turn with another token than the tokenizer's."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            ends = msgspec.json.decode(path.read_bytes(), type=_Ends).eos_token_id
        except msgspec.DecodeError as error:
            raise TokenizerUnusable(f"{path}: can't be read: {error}") from error
        if ends is not None:
            found.update([ends] if isinstance(ends, int) else ends)
    return found


def _byte_alphabet() -> dict[str, int]:
    """The printable letter for each byte that byte-level BPE vocabularies are written in (GPT-2's).

    Bytes that print as Latin-1 stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
