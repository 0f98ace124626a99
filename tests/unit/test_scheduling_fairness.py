"""Fair waiting: the bounds of virtual token counters, no class and no tenant starved, nobody lost."""

from collections import Counter, deque
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.scheduling.fairness import FairQueue, Share
from halfmoon.scheduling.service_class import default_classes
from halfmoon.scheduling.waiting import OUTPUT_WEIGHT, WaitingRoom

CLASSES = default_classes()
WEIGHTS = {name: each.weight for name, each in CLASSES.items()}
MAX_PROMPT = 100
MAX_OUTPUT = 50
NUM_PLACES = 4


def share(tenant: str, service_class: str = "interactive") -> Share:
    return Share(service_class=service_class, tenant=tenant)


def queue(tenant_weights: dict[str, float] | None = None) -> FairQueue[str]:
    return FairQueue(WEIGHTS, tenant_weights)


def fill(line: FairQueue[str], *items: tuple[str, Share, int]) -> None:
    for arrival, (item, account, num_tokens) in enumerate(items):
        line.put(item, account, num_tokens=num_tokens, arrival=arrival)


def drained(line: FairQueue[str]) -> list[str]:
    order: list[str] = []
    while (item := line.pop()) is not None:
        order.append(item)
    return order


class Server:
    """Serves what its queue gives, so many at a time; outputs become known while they run, as in a batch."""

    def __init__(self, line: FairQueue[int]) -> None:
        self.line = line
        self.served: Counter[Share] = Counter()
        self.running: deque[tuple[Share, int]] = deque()
        self._numbers = count()
        self._of: dict[int, tuple[Share, int]] = {}

    def submit(self, account: Share, num_tokens: int) -> None:
        number = next(self._numbers)
        self._of[number] = account, num_tokens
        self.line.put(number, account, num_tokens=num_tokens, arrival=number)

    def step(self, num_prompt: int, num_output: int) -> Share:
        """One that runs ends, the next begins, and who was served at once submits another."""
        if len(self.running) == NUM_PLACES:
            account, num_tokens = self.running.popleft()
            self.line.charge(account, num_tokens)
            self.served[account] += num_tokens
        number = self.line.peek()
        assert number is not None
        account, num_tokens = self._of[number]
        self.submit(account, num_prompt)
        assert self.line.pop() == number
        self.served[account] += num_tokens
        self.running.append((account, num_output))
        return account


STEPS = st.lists(st.tuples(st.integers(1, MAX_PROMPT), st.integers(0, MAX_OUTPUT)), min_size=1, max_size=150)


@given(STEPS, st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=4))
def test_what_tenants_that_wait_are_served_stays_within_the_bound(
    steps: list[tuple[int, int]], weights: list[float]
) -> None:
    """VTC's lemma 4.3: one prompt, and the outputs of one tenant's running requests, in shares of the weights."""
    shares = [share(f"tenant-{number}") for number in range(len(weights))]
    by_share = dict(zip(shares, weights, strict=True))
    server = Server(FairQueue(WEIGHTS, {each.tenant: weight for each, weight in by_share.items()}))
    for account in shares:
        server.submit(account, MAX_PROMPT)
    for num_prompt, num_output in steps:
        server.step(num_prompt, num_output)
        normal = [server.served[account] / weight for account, weight in by_share.items()]
        assert max(normal) - min(normal) <= (MAX_PROMPT + NUM_PLACES * MAX_OUTPUT) / min(weights)


@given(STEPS)
def test_batch_gets_its_share_and_no_more_however_much_is_interactive(steps: list[tuple[int, int]]) -> None:
    interactive, batch = share("a"), share("a", "batch")
    server = Server(FairQueue(WEIGHTS))
    server.submit(interactive, MAX_PROMPT)
    server.submit(batch, MAX_PROMPT)
    between = 0
    bound = MAX_PROMPT + NUM_PLACES * MAX_OUTPUT
    for num_prompt, num_output in steps:
        before = server.served[interactive]
        served = server.step(num_prompt, num_output)
        between = 0 if served == batch else between + server.served[interactive] - before
        # No starvation: between two of batch, interactive is served 16 times what batch was ahead by, and one more.
        assert between <= 16 * bound + bound
        # And batch yields: it is never ahead of its sixteenth by more than what it had begun.
        assert server.served[batch] <= server.served[interactive] / 16 + bound


@given(st.lists(st.tuples(st.sampled_from("pgr"), st.integers(0, 5), st.integers(1, 9)), max_size=80))
def test_each_item_leaves_once_by_its_turn_or_by_its_removal(steps: list[tuple[str, int, int]]) -> None:
    line: FairQueue[int] = FairQueue(WEIGHTS)
    waiting: dict[int, Share] = {}
    numbers = count()
    for what, pick, num_tokens in steps:
        if what == "p":
            number = next(numbers)
            waiting[number] = share(f"tenant-{pick % 3}", ("interactive", "batch")[pick % 2])
            line.put(number, waiting[number], num_tokens=num_tokens, arrival=number, priority=pick % 2)
        elif what == "g":
            head = line.peek()
            assert line.pop() == head
            assert (head is None) == (not waiting)
            if head is not None:
                del waiting[head]
        else:
            victim = sorted(waiting)[pick % len(waiting)] if waiting else 99
            assert line.remove(victim) == (victim in waiting)
            waiting.pop(victim, None)
        assert len(line) == len(waiting)
        assert line.waiting() == Counter(waiting.values())
        assert all(number in line for number in waiting)
    order = []
    while (item := line.pop()) is not None:
        order.append(item)
    assert sorted(order) == sorted(waiting)


def test_a_flood_of_one_tenant_is_behind_the_first_of_another() -> None:
    line = queue()
    fill(line, *((f"flood-{n}", share("loud"), 10) for n in range(5)), ("quiet-0", share("quiet"), 10))
    # Who begins to wait stands where the least served does: behind nobody but whom had come first.
    assert drained(line) == ["flood-0", "quiet-0", "flood-1", "flood-2", "flood-3", "flood-4"]


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    line = queue({"heavy": 2.0})
    items = [(f"{name}-{n}", share(name), 10) for n in range(6) for name in ("heavy", "light")]
    fill(line, *items)
    assert Counter(item.split("-")[0] for item in drained(line)[:9]) == {"heavy": 6, "light": 3}


def test_within_one_tenant_priority_then_arrival() -> None:
    line = queue()
    for arrival, (item, priority) in enumerate((("a", 0), ("b", 0), ("c", 7), ("d", -1), ("e", 7))):
        line.put(item, share("one"), num_tokens=1, arrival=arrival, priority=priority)
    assert drained(line) == ["c", "e", "a", "b", "d"]


def test_priority_of_one_tenant_takes_nothing_from_another() -> None:
    line = queue()
    for arrival in range(3):
        line.put(f"pushy-{arrival}", share("pushy"), num_tokens=10, arrival=arrival, priority=1000)
        line.put(f"calm-{arrival}", share("calm"), num_tokens=10, arrival=arrival)
    assert [item.split("-")[0] for item in drained(line)] == ["pushy", "calm"] * 3


def test_interactive_goes_first_where_both_classes_begin_to_wait() -> None:
    line = queue()
    fill(line, ("b", share("t", "batch"), 10), ("i", share("t"), 10))
    assert drained(line) == ["i", "b"]


def test_what_was_used_while_nobody_waited_is_forgotten() -> None:
    line = queue()
    for arrival in range(100):
        line.put(f"idle-{arrival}", share("early"), num_tokens=1000, arrival=arrival)
        line.pop()
        line.charge(share("early"), 1000)
    fill(line, ("e-0", share("early"), 10), ("l-0", share("late"), 10), ("e-1", share("early"), 10))
    assert drained(line) == ["e-0", "l-0", "e-1"]


def test_outputs_count_when_they_are_known() -> None:
    line = queue()
    items = [(f"{name}-{n}", share(name), 10) for n in range(3) for name in ("a", "b")]
    fill(line, *items)
    assert [line.pop(), line.pop()] == ["a-0", "b-0"]
    line.charge(share("a"), 15)
    assert drained(line) == ["b-1", "b-2", "a-1", "a-2"]


def test_the_one_turned_away_is_the_last_of_whoever_has_most_and_of_batch_before_interactive() -> None:
    line = queue({"heavy": 10.0})
    fill(line, *((f"a-{n}", share("a"), 10) for n in range(3)), ("b-0", share("b"), 10))
    assert line.last() == "a-2"
    line.put("heavy-0", share("heavy"), num_tokens=200, arrival=9)
    assert line.last() == "a-2"
    line.put("batch-0", share("c", "batch"), num_tokens=1, arrival=10)
    assert line.last() == "batch-0"


def test_tokens_before_one_are_its_own_tenants_and_the_others_share_meanwhile() -> None:
    line = queue()
    fill(
        line,
        ("a-0", share("a"), 10),
        ("a-1", share("a"), 20),
        ("a-2", share("a"), 30),
        ("b-0", share("b"), 500),
        ("c-0", share("c"), 5),
        ("batch-0", share("a", "batch"), 160),
    )
    assert line.tokens_before("a-0") == pytest.approx(10 + 5 + (10 + 10 + 5) / 16)
    assert line.tokens_before("a-2") == pytest.approx(30 + 60 + 5 + (60 + 60 + 5) / 16)


def room(max_waiting: int = 10) -> WaitingRoom[str]:
    return WaitingRoom(CLASSES, {}, max_waiting)


def enter(waiting: WaitingRoom[str], item: str, tenant: str = "t", now_s: float = 0.0) -> None:
    waiting.enter(item, share(tenant), num_tokens=100, arrived_s=now_s, now_s=now_s)


def test_a_room_turns_away_only_whom_it_has_no_place_for() -> None:
    waiting = room(2)
    enter(waiting, "a")
    enter(waiting, "b")
    assert waiting.surplus() is None
    enter(waiting, "c", "other")
    assert waiting.surplus() == "b"
    assert waiting.leave("b")
    assert waiting.surplus() is None
    assert not waiting.leave("b")


def test_the_wait_to_expect_is_known_once_some_were_served() -> None:
    waiting = room(20)
    for number in range(10):
        enter(waiting, f"r{number}")
    for number in range(4):
        assert waiting.expected_wait_s("r9", 0.5 * number) is None
        assert waiting.serve(0.5 * (number + 1)) == f"r{number}"
    # 100 tokens each half second; 500 tokens are before it. The rate weighs the latest most.
    assert waiting.expected_wait_s("r9", 2.0) == pytest.approx(2.5, rel=0.05)
    assert waiting.expected_wait_s("r4", 2.0) == 0.0


def test_generated_tokens_weigh_twice_those_of_prompts() -> None:
    waiting = room()
    for number in range(2):
        enter(waiting, f"a{number}", "a")
        enter(waiting, f"b{number}", "b")
    assert [waiting.serve(0.0), waiting.serve(0.0)] == ["a0", "b0"]
    waiting.charge_output(share("a"), 10)
    waiting.charge_prompt(share("b"), int(10 * OUTPUT_WEIGHT) - 1)
    assert waiting.next() == "b1"
