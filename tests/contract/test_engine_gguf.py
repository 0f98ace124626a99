"""A GGUF file is served as it is: the same geometry and the same tokens as the folder made from it."""

from pathlib import Path

import pytest

from halfmoon.engine.factory import kv_bytes_per_token
from halfmoon.models import ModelFolder
from support.engines import GREEDY, generated, started, token_ids
from support.model import small_gguf, small_model
from support.prompts import random_tokens
from support.reference import greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def file() -> Path:
    return small_gguf()


def test_geometry_is_that_of_the_folder(file: Path) -> None:
    packed, folder = ModelFolder.open(file), ModelFolder.open(small_model())
    assert packed.geometry == folder.geometry
    assert packed.is_gguf
    assert packed.default_name == folder.default_name
    assert packed.weight_files() == [file]
    assert kv_bytes_per_token("torch", file, "auto") == kv_bytes_per_token("torch", small_model(), "auto")


@pytest.mark.nightly
async def test_tokens_are_those_of_the_folder(file: Path) -> None:
    prompts = [random_tokens(count, seed=count) for count in (1, 70)]
    expected = greedy(small_model(), prompts, 6)
    async with started("torch", file, kv_tokens=512) as engine:
        assert [token_ids(await generated(engine, prompt, GREEDY)) for prompt in prompts] == expected
