"""Chunk keys and the cutting of prompts: the ground on which sharing stands."""

import hashlib
import json
import os
import struct
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.chunks.keys import Namespace, chunk_keys, handover_key
from halfmoon.chunks.plan import plan_chunks
from halfmoon.schemas.ids import TransferId

ROOT = bytes(range(32))
TRANSFER = TransferId("xfer-1")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_a_key_is_sha256_of_parent_and_little_endian_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 0xFFFFFFFF)).digest()
    assert chunk_keys(ROOT, [1, 2, 3, 0xFFFFFFFF, 5], 2) == [first, second]


def test_the_namespace_root_is_sha256_of_sorted_json() -> None:
    canonical = (
        '{"adapter":"","fingerprint":"f","kv_dtype":"float32","layout":"lktHd.v1","tenant_salt":"t","version":1}'
    )
    namespace = Namespace(fingerprint="f", kv_dtype="float32", layout="lktHd.v1", tenant_salt="t")
    assert namespace.root() == hashlib.sha256(canonical.encode()).digest()


@pytest.mark.parametrize("field", ["fingerprint", "kv_dtype", "layout", "adapter", "tenant_salt"])
def test_models_dtypes_layouts_adapters_and_tenants_never_share(field: str) -> None:
    base = Namespace(fingerprint="f", kv_dtype="float32", layout="l", adapter="a", tenant_salt="t")
    other = msgspec.structs.replace(base, **{field: "other"})
    ours, theirs = chunk_keys(base.root(), range(8), 4), chunk_keys(other.root(), range(8), 4)
    assert ours == chunk_keys(msgspec.structs.replace(base).root(), range(8), 4)
    assert not set(ours) & set(theirs)


@given(tokens, st.integers(0, 69), st.integers(1, 9))
def test_prompts_that_differ_early_never_match_later(prompt: list[int], where: int, chunk_tokens: int) -> None:
    if where >= len(prompt):
        return
    other = list(prompt)
    other[where] ^= 1
    ours, theirs = chunk_keys(ROOT, prompt, chunk_tokens), chunk_keys(ROOT, other, chunk_tokens)
    same = where // chunk_tokens
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_processes_with_other_hash_seeds_agree(seed: str) -> None:
    script = (
        "import json; from halfmoon.chunks.keys import Namespace, chunk_keys\n"
        "root = Namespace(fingerprint='f', kv_dtype='float32', layout='l', tenant_salt='t').root()\n"
        "print(json.dumps([key.hex() for key in chunk_keys(root, range(600), 256)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        timeout=30,
    )
    root = Namespace(fingerprint="f", kv_dtype="float32", layout="l", tenant_salt="t").root()
    assert json.loads(done.stdout) == [key.hex() for key in chunk_keys(root, range(600), 256)]


def test_a_token_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        chunk_keys(ROOT, [2**32], 1)


@given(tokens.filter(bool), st.integers(1, 9))
def test_a_plan_covers_all_that_decode_does_not_compute(prompt: list[int], chunk_tokens: int) -> None:
    plan = plan_chunks(ROOT, prompt, chunk_tokens=chunk_tokens, payload_bytes=(3).__mul__, transfer_id=TRANSFER)
    covered = sum(chunk.num_tokens for chunk in plan)
    assert covered in (len(prompt) - 1, len(prompt))
    assert (covered == len(prompt)) == (len(prompt) % chunk_tokens == 0)
    assert [chunk.index for chunk in plan] == list(range(len(plan)))
    assert [chunk.key for chunk in plan if chunk.shared] == chunk_keys(ROOT, prompt, chunk_tokens)
    assert all(chunk.num_bytes == 3 * chunk.num_tokens for chunk in plan)
    assert [chunk.parent for chunk in plan] == [None, *(chunk.key for chunk in plan)][: len(plan)]


def test_partial_chunks_of_two_transfers_have_different_keys() -> None:
    assert handover_key(TransferId("a"), 0) != handover_key(TransferId("b"), 0)
    assert handover_key(TransferId("a"), 0) != handover_key(TransferId("a"), 1)
