"""Tokens of texts and chats; what is refused, and how."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from halfmoon.text import TextCodec, TextError, TokenizerUnusable
from support import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.load(folder)


def test_a_chat_becomes_what_the_template_says(codec: TextCodec) -> None:
    tokens = codec.encode_chat([{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}])
    shown = "<|start|>system\nbe brief<|end|>\n<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert codec.decode(tokens, skip_special_tokens=False) == shown
    assert codec.decode(tokens) == "system\nbe brief\nuser\nhello\nassistant\n"


def test_text_parts_equal_the_joined_string(codec: TextCodec) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "wörld 😀"}]
    assert codec.encode_chat([{"role": "user", "content": parts}]) == codec.encode_chat(
        [{"role": "user", "content": "hello wörld 😀"}]
    )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must not be empty"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content must be a string"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0] has type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] has type None"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "tool", "content": "x"}], "chat template refuses these messages: no tools here"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ],
)
def test_what_cannot_be_a_chat_is_refused(codec: TextCodec, messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(TextError) as caught:
        codec.encode_chat(messages)
    assert said in str(caught.value)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    codec = TextCodec.load(tiny_tokenizer.byte_fallback(tmp_path))
    with pytest.raises(TextError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "x"}])


def test_tokens_alone(codec: TextCodec) -> None:
    tokens = codec.encode("hello 😀")
    assert b"".join(codec.token_bytes(token) for token in tokens) == "hello 😀".encode()
    assert [codec.token_text(token) for token in tokens[-3:]] == ["\ufffd"] * 3
    assert [codec.token_text(token) for token in codec.eos_tokens] == ["<|end|>"]
    assert [codec.token_bytes(token) for token in codec.eos_tokens] == [b"<|end|>"]
    assert codec.token_text(10**6) == ""
    assert codec.token_bytes(10**6) == b""


def test_bytes_of_fallback_tokens(tmp_path: Path) -> None:
    codec = TextCodec.load(tiny_tokenizer.byte_fallback(tmp_path))
    assert b"".join(codec.token_bytes(token) for token in codec.encode("😀")[1:]) == "😀".encode()


def test_all_ends_of_sequence_count(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 11, "model_type": "llama"}))
    assert TextCodec.load(tmp_path).eos_tokens == {7, 9, 11} | TextCodec.load(folder).eos_tokens


def test_many_threads_at_once(codec: TextCodec) -> None:
    texts = [f"hello {number} 😀" * 20 for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert [codec.decode(tokens) for tokens in pool.map(codec.encode, texts)] == texts


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match="no such folder"):
        TextCodec.load(tmp_path / "missing")
    with pytest.raises(TokenizerUnusable, match=r"has no tokenizer\.json"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnusable, match="can't be loaded"):
        TextCodec.load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"not so")
    with pytest.raises(TokenizerUnusable, match="not a GGUF file"):
        TextCodec.load(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(TokenizerUnusable, match="tokenizer can't be read"):
        TextCodec.load(tmp_path / "model.gguf")


def test_torch_is_never_imported(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from halfmoon.text import TextCodec;"
        f"codec = TextCodec.load(Path({str(folder)!r}));"
        "codec.decode(codec.encode_chat([{'role': 'user', 'content': 'hello'}]));"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "False\n"
