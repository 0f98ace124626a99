"""Who may start beside whom, and who is told to have no partner."""

import msgspec
import pytest

from halfmoon.conductor.partners import Lonely, without_partner
from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.schemas.ids import ModelName, NodeId, WorkerId
from halfmoon.schemas.members import MemberState, WorkerHeartbeat
from halfmoon.schemas.model import KV_FIELDS, ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.worker.partners import Newcomer, kv_differences, unfit
from support.conductors import CARD

OTHER = msgspec.structs.replace(CARD, kv_dtype="bfloat16", chunk_tokens=32)


def newcomer(role: Role = Role.PREFILL, *, started_ns: int = 10, card: ModelCard = CARD) -> Newcomer:
    return Newcomer(worker=WorkerId("w-new"), role=role, started_ns=started_ns, card=card)


def there(
    role: Role = Role.DECODE,
    *,
    name: str = "w-old",
    card: ModelCard | None = OTHER,
    state: MemberState = MemberState.SERVING,
    started_ns: int = 1,
) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=WorkerId(name), role=role, node=NodeId("a"), started_ns=started_ns, state=state, card=card
    )


@pytest.mark.parametrize("field", KV_FIELDS)
def test_each_field_of_the_kv_makes_a_difference(field: str) -> None:
    value = getattr(CARD, field)
    other = msgspec.structs.replace(CARD, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert kv_differences(CARD, other) == {field: (value, getattr(other, field))}
    assert kv_differences(CARD, CARD) == {}
    assert unfit(newcomer(), [there(card=other)]) is not None


def test_what_has_nothing_to_do_with_kv_makes_none() -> None:
    other = msgspec.structs.replace(CARD, engine="torch", max_model_tokens=9, vocab_size=9)
    assert kv_differences(CARD, other) == {}


def test_the_refusal_names_what_differs_and_what_to_do() -> None:
    why = unfit(newcomer(), [there()])
    assert why is not None
    assert "kv_dtype is float32 here, bfloat16 there" in why
    assert "chunk_tokens is 16 here, 32 there" in why
    assert "w-old" in why
    assert "HALFMOON_PREFILL_ALLOW_OTHER_KV=true" in why
    long = unfit(newcomer(), [there(card=msgspec.structs.replace(CARD, fingerprint="e" * 64))])
    assert long is not None
    assert f"fingerprint is {'f' * 12}… here, {'e' * 12}… there" in long


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_one_partner_with_the_same_kv_is_enough(role: Role) -> None:
    wanted = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert unfit(newcomer(role), []) is None
    assert unfit(newcomer(role), [there(wanted)]) is not None
    assert unfit(newcomer(role), [there(wanted), there(wanted, name="w-2", card=CARD)]) is None


@pytest.mark.parametrize(
    "beat",
    [
        there(Role.PREFILL),
        there(Role.COLOCATED),
        there(card=None, state=MemberState.LOADING),
        there(card=msgspec.structs.replace(OTHER, name=ModelName("another"))),
        there(state=MemberState.DRAINING),
        there(name="w-new"),
        there(state=MemberState.LOADING, started_ns=11),
    ],
    ids=["same role", "colocated", "loading", "other model", "leaves", "its last life", "came later"],
)
def test_those_that_are_no_partners_keep_nobody_from_starting(beat: WorkerHeartbeat) -> None:
    assert unfit(newcomer(), [beat]) is None


def test_colocated_workers_need_nobody() -> None:
    assert unfit(newcomer(Role.COLOCATED), [there(), there(Role.PREFILL, name="w-2")]) is None


def test_of_two_that_start_together_the_later_gives_way() -> None:
    one = newcomer(started_ns=5)
    two = Newcomer(worker=WorkerId("w-old"), role=Role.DECODE, started_ns=5, card=OTHER)
    beats = [
        there(state=MemberState.LOADING, started_ns=5),
        there(Role.PREFILL, name="w-new", card=CARD, state=MemberState.LOADING, started_ns=5),
    ]
    assert (unfit(one, beats) is None) != (unfit(two, beats) is None)


def load(name: str, role: Role, card: ModelCard = CARD) -> WorkerLoad:
    return WorkerLoad(worker=WorkerId(name), role=role, node=NodeId("a"), card=card)


def test_who_has_no_partner_of_its_kind() -> None:
    pair = [load("p1", Role.PREFILL), load("d1", Role.DECODE)]
    assert without_partner(pair) == {}
    assert without_partner([*pair, load("c1", Role.COLOCATED, OTHER)]) == {}
    assert without_partner([*pair, load("p2", Role.PREFILL, OTHER)]).keys() == {"p2"}
    mixed = [load("p1", Role.PREFILL), load("d1", Role.DECODE, OTHER), load("c1", Role.COLOCATED)]
    assert without_partner(mixed).keys() == {"p1", "d1"}


def test_the_lonely_are_told_of_once_and_not_at_once() -> None:
    lonely, alone, pair = Lonely(alone_after_s=5.0), [load("p1", Role.PREFILL)], [load("d1", Role.DECODE)]
    assert lonely.look(alone, 0.0) == (1, [])
    assert lonely.look(alone, 4.9) == (1, [])
    assert lonely.look(alone, 5.0) == (1, alone)
    assert lonely.look(alone, 50.0) == (1, [])
    assert lonely.look([*alone, *pair], 51.0) == (0, [])
    assert lonely.look(alone, 52.0) == (1, [])
    assert lonely.look(alone, 57.0) == (1, alone)
