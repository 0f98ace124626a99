"""Names in subjects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.schemas import subjects
from halfmoon.schemas.ids import ModelName, WorkerId


@given(st.text(min_size=1).filter(lambda text: max(text) < "\ud800" or max(text) > "\udfff"))
def test_any_name_is_one_token_and_comes_back(name: str) -> None:
    escaped = subjects.token(name)
    assert not set(escaped) & set(" .*>\t\n\r")
    assert subjects.untoken(escaped) == name


def test_a_model_with_dots_and_slashes_is_one_token() -> None:
    assert subjects.request(ModelName("org/model-1.5")) == "halfmoon.request.org/model-1%2E5"


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        subjects.heartbeat(WorkerId(""))
