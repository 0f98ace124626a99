"""The published tokenizer of the small model: our tokens are the ones that its makers' library gives."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.text import TextCodec
from support.model import small_model

pytestmark = pytest.mark.model

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Answer in one word. 😀"},
        {"role": "user", "content": "नमस्ते  "},
        {"role": "assistant", "content": "Hello.\n"},
        {"role": "user", "content": "\t中文?"},
    ],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return small_model()


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.load(folder)


@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
def test_chats_equal_the_reference(folder: Path, codec: TextCodec, chat: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    assert codec.encode_chat(chat) == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = chat[-1]["content"]
    assert codec.encode(text) == reference(text).input_ids
    assert codec.eos_tokens == {reference.eos_token_id}


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
@settings(deadline=None)
def test_any_text_comes_back_token_by_token(codec: TextCodec, text: str) -> None:
    tokens = codec.encode(text)
    detokenizer = codec.detokenizer(codec.encode_chat(CHATS[0]))
    pieces = [detokenizer.push([token]) for token in tokens] + [detokenizer.flush()]
    assert "".join(pieces) == codec.decode(tokens)
    assert b"".join(codec.token_bytes(token) for token in tokens).decode(errors="replace") == codec.decode(
        tokens, skip_special_tokens=False
    )
