"""What is asked of all workers at once: the same as asking for each, whatever came, went and was learned before."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.cluster import WorkerLoad, Workers
from halfmoon.scheduling.costs.fitted import Fitted
from halfmoon.scheduling.costs.traffic import Traffic
from halfmoon.scheduling.estimates import Assumed
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.measurements import DecodeSample, PrefillSample
from halfmoon.schemas.splits import Role
from support.conductors import CARD

NAMES = [WorkerId(name) for name in ("w1", "w2", "w3", "w4")]
LIKE = (CARD.name, CARD.fingerprint, Role.PREFILL.value)


def load(name: WorkerId, draw: random.Random) -> WorkerLoad:
    queued_tokens = draw.choice([0, draw.randint(1, 50_000)])
    return WorkerLoad(
        worker=name,
        role=Role.PREFILL,
        node=NodeId(f"node-of-{name}"),
        card=CARD,
        num_requests=draw.randint(0, 20),
        num_waiting=draw.randint(0, 5),
        max_requests=16,
        queued_tokens=queued_tokens,
        queued_pairs=queued_tokens * draw.uniform(0, 5_000),
        context_tokens=draw.randint(0, 100_000),
        free_tokens=draw.randint(0, 1_000),
        total_tokens=draw.choice([0, 1_000, 2_000]),
    )


def learn(fitted: Fitted, name: WorkerId, draw: random.Random) -> None:
    sample = PrefillSample(num_tokens=draw.randint(100, 9_000), num_reused=0, duration_s=draw.uniform(0.01, 2))
    fitted.prefilled(name, LIKE, sample)
    fitted.decoded(
        name, LIKE, DecodeSample(batch=draw.randint(1, 30), context_tokens=5_000, step_s=draw.random() + 0.01)
    )


def agree(fitted: Fitted, workers: Workers) -> None:
    for num_tokens, num_reused in ((5_000, 0), (5_000, 4_999), (1, 0)):
        each = [fitted.prefill_s(worker, num_tokens, num_reused) for worker in workers]
        assert list(fitted.prefills_s(workers, num_tokens, num_reused)) == pytest.approx(each, rel=1e-12)
    assert list(fitted.queues_s(workers)) == pytest.approx([fitted.queue_s(worker) for worker in workers], rel=1e-12)
    tbts_s = [fitted.tbt_s(each, each.num_requests + 1, each.context_tokens + 700) for each in workers]
    assert list(fitted.next_tbts_s(workers, 700)) == pytest.approx(tbts_s, rel=1e-12)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["learn", "forget", "change"]), st.sampled_from(NAMES)), max_size=60),
    seed=st.integers(0, 1_000),
)
def test_columns_say_what_each_worker_alone_is_said_to_take(steps: list[tuple[str, WorkerId]], seed: int) -> None:
    draw = random.Random(seed)
    fitted = Fitted(Assumed(), Traffic())
    workers = Workers(load(name, draw) for name in NAMES)
    others = Workers(load(name, draw) for name in NAMES[2:])
    agree(fitted, workers)
    for what, name in steps:
        if what == "learn":
            learn(fitted, name, draw)
        elif what == "forget":
            fitted.forget(name)
        else:
            workers = workers.updated([load(name, draw), load(WorkerId("stranger"), draw)])
        agree(fitted, workers)
        agree(fitted, others)


@given(changes=st.lists(st.lists(st.sampled_from(NAMES), max_size=4), max_size=8), seed=st.integers(0, 1_000))
def test_workers_kept_up_to_date_are_as_if_made_anew(changes: list[list[WorkerId]], seed: int) -> None:
    draw = random.Random(seed)
    kept = reloaded = Workers(load(name, draw) for name in NAMES)
    for names in changes:
        kept = kept.updated([load(name, draw) for name in names])
        reloaded = reloaded.reloaded(list(kept))
        anew = Workers(kept)
        for each in (kept, reloaded):
            assert each == anew
            assert [column.tolist() for column in each.table] == [column.tolist() for column in anew.table]
            assert each.queued.tolist() == anew.queued.tolist()
            assert each.least_limit_tokens == min(worker.limit_tokens for worker in kept)
            assert each.longest_line == max(worker.num_waiting for worker in kept)
            assert each.roster is kept.roster


def test_other_workers_are_looked_at_anew() -> None:
    draw = random.Random(1)
    workers = Workers(load(name, draw) for name in NAMES[:2])
    for loads in ([load(name, draw) for name in NAMES[1:3]], [workers[1], workers[0]], list(workers[:1])):
        assert workers.reloaded(loads).roster.places == {each.worker: at for at, each in enumerate(loads)}
