"""Prompts as operators give them, and what many nodes' answers come to: the pure parts of `halfmoon cache`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.cli.cache_prompts import Prompt, PromptFileError, read_keys, read_prompts
from halfmoon.cli.cache_report import listing
from halfmoon.schemas.chunks import ChunkMeta, Tier
from halfmoon.schemas.ids import ChunkKey, NodeId, RequestId
from halfmoon.schemas.listing import ChunkOrder, HeldChunk


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_text_file_is_one_prompt_or_one_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts.txt", "first line \n\n  second\n")
    assert read_prompts(path, by_line=False) == [Prompt(prompt="first line \n\n  second")]
    assert read_prompts(path, by_line=True) == [Prompt(prompt="first line "), Prompt(prompt="  second")]


def test_lines_of_json_are_messages_prompts_or_tokens(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "hello"},)
    lines = (
        '[{"role": "user", "content": "hello"}]',
        '{"messages": [{"role": "user", "content": "hello"}], "model": "passed over"}',
        '{"prompt": "hello"}',
        '{"tokens": [1, 2]}',
        "",
    )
    assert read_prompts(write(tmp_path, "p.jsonl", "\n".join(lines)), by_line=False) == [
        Prompt(messages=said),
        Prompt(messages=said),
        Prompt(prompt="hello"),
        Prompt(tokens=(1, 2)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: .*expected chat messages"),
        ('{"tokens": ["x"]}', "line 2: Expected `int`"),
        ('{"prompt": "x", "tokens": [1]}', "line 2: give exactly one"),
        ("{}", "line 2: give exactly one"),
    ],
)
def test_a_wrong_line_is_named_and_its_text_is_not_repeated(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "secret words"}\n' + line)
    with pytest.raises(PromptFileError, match=words) as caught:
        read_prompts(path, by_line=False)
    assert "secret" not in str(caught.value)


def test_a_file_without_prompts_and_a_key_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="holds no prompt"):
        read_prompts(write(tmp_path, "empty.txt", "\n \n"), by_line=False)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptFileError, match="no text in UTF-8"):
        read_prompts(tmp_path / "binary.txt", by_line=False)
    for text in ("xyz", "ab" * 31):
        with pytest.raises(PromptFileError, match="64 hex digits"):
            read_keys([text])
    assert read_keys(["ab" * 32]) == (b"\xab" * 32,)


def held(number: int, hits: int) -> HeldChunk:
    meta = ChunkMeta(
        key=ChunkKey(bytes([number]) * 32),
        index=number,
        num_tokens=64,
        num_bytes=10,
        checksum=b"",
        request_id=RequestId("r"),
        created_ns=number,
        hits=hits,
        tier=Tier.DRAM,
    )
    return HeldChunk(meta=meta)


@given(
    st.dictionaries(
        st.sampled_from([NodeId("a"), NodeId("b"), NodeId("c")]),
        st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=20),
        max_size=3,
    ),
    st.integers(1, 8),
)
def test_pages_by_key_put_together_are_all_chunks_with_all_their_copies(
    chunks: dict[NodeId, dict[int, int]], limit: int
) -> None:
    """Each node answers with its first `limit` after the key asked for, as a kv-tier does."""
    seen: dict[str, int] = {}
    after = ""
    while True:
        pages = {
            node: [held(number, hits) for number, hits in sorted(of.items()) if held(number, 0).meta.key.hex() > after][
                :limit
            ]
            for node, of in chunks.items()
        }
        found = listing(pages, 0, {}, ChunkOrder.KEY, limit)
        assert len(found.chunks) <= limit
        for row in found.chunks:
            assert row.key not in seen
            seen[row.key] = len(row.copies)
        if found.next is None:
            break
        after = found.next
    numbers = {number for of in chunks.values() for number in of}
    assert seen == {held(each, 0).meta.key.hex(): sum(each in of for of in chunks.values()) for each in numbers}
