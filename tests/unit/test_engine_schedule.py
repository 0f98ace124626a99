"""What a step of the torch engine holds."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.engine.torch.schedule import Part, Want, plan_step


def plan(*wants: Want, prefill: int = 256, mixed: int = 64, batch: int = 4) -> list[Part]:
    return plan_step(wants, prefill_step_tokens=prefill, mixed_step_tokens=mixed, max_batch=batch)


def test_nothing_wanted_nothing_planned() -> None:
    assert plan() == []


def test_a_prompt_alone_gets_whole_steps() -> None:
    assert plan(Want("a", 0, 1000, False)) == [Part("a", 0, 256)]
    assert plan(Want("a", 960, 1000, False)) == [Part("a", 960, 1000)]


def test_a_prompt_beside_decoding_ones_gets_less() -> None:
    wants = [Want("a", 0, 1000, False), Want("b", 70, 71, True)]
    assert plan(*wants) == [Part("b", 70, 71), Part("a", 0, 64)]


def test_first_come_first_served() -> None:
    wants = [Want("a", 0, 200, False), Want("b", 0, 200, False), Want("c", 0, 200, False)]
    assert plan(*wants) == [Part("a", 0, 200), Part("b", 0, 56)]


@st.composite
def some_wants(draw: st.DrawFn) -> list[Want]:
    wants = []
    for number in range(draw(st.integers(1, 12))):
        start, is_decoding = draw(st.integers(0, 500)), draw(st.booleans())
        stop = start + (1 if is_decoding else draw(st.integers(1, 500)))
        wants.append(Want(str(number), start, stop, is_decoding))
    return wants


@given(some_wants(), st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_every_plan_moves_on_within_bounds(wants: list[Want], prefill: int, mixed: int, batch: int) -> None:
    parts = plan(*wants, prefill=prefill, mixed=mixed, batch=batch)
    by_id = {want.seq_id: want for want in wants}
    assert parts
    assert len({part.seq_id for part in parts}) == len(parts)
    for part in parts:
        want = by_id[part.seq_id]
        assert part.start == want.start
        assert want.start < part.stop <= want.stop
    decoding = [part for part in parts if by_id[part.seq_id].is_decoding]
    assert len(decoding) == min(batch, sum(want.is_decoding for want in wants))
    prompt_tokens = sum(part.stop - part.start for part in parts if part not in decoding)
    assert prompt_tokens <= (mixed if decoding else prefill)
