"""What services add to first tokens, told apart from computing and waiting."""

import msgspec
import pytest

from halfmoon.planner.overhead import MIN_REQUESTS, Overhead
from halfmoon.schemas.ids import RequestId, TransferId, WorkerId
from halfmoon.schemas.requests import Usage
from halfmoon.schemas.splits import HalfEnded, Role

PREFILL = (0.5, 0.01, 0.0)
STEP = (0.1, 0.0, 0.001)
ENDED = HalfEnded(
    request_id=RequestId("r"), transfer_id=TransferId("t"), worker=WorkerId("d"), role=Role.DECODE, ttft_s=1.0
)


def ended(num_tokens: int, num_reused: int, more_s: float) -> HalfEnded:
    computing_s = 0.5 + 0.01 * (num_tokens - num_reused) + 0.1 + 0.001 * num_tokens
    usage = Usage(prompt_tokens=num_tokens, completion_tokens=3, cached_tokens=num_reused)
    return msgspec.structs.replace(ENDED, ttft_s=computing_s + more_s, usage=usage)


def test_it_is_what_those_need_beyond_computing_that_waited_for_nobody() -> None:
    overhead = Overhead()
    for number in range(100):
        waited_s = 0.0 if number % 5 == 0 else number
        overhead.hear(ended(100 + number, number, 0.25 + waited_s))
    assert overhead.seconds(PREFILL, STEP) == pytest.approx(0.25)


def test_few_requests_and_those_without_a_first_token_say_nothing() -> None:
    overhead = Overhead()
    for _ in range(MIN_REQUESTS - 1):
        overhead.hear(ended(100, 0, 0.25))
    overhead.hear(ENDED)
    overhead.hear(msgspec.structs.replace(ended(100, 0, 0.25), ttft_s=None))
    assert overhead.seconds(PREFILL, STEP) is None
    overhead.hear(ended(100, 0, 0.25))
    assert overhead.seconds(PREFILL, STEP) == pytest.approx(0.25)
