"""Whose a request is, on both buses: each client hears one end, also where workers or conductors weren't there."""

import msgspec

from halfmoon.bus.codec import encode
from halfmoon.bus.endpoint import announce, call
from halfmoon.bus.errors import BusTimeout, NoResponders
from halfmoon.conductor.dispatch import HEADER_SENDER
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import RequestId, TenantId, TransferId, WorkerId
from halfmoon.schemas.members import Goodbye
from halfmoon.schemas.requests import Sampling
from halfmoon.schemas.splits import DecodeHalf, HalfClaim, HalfClaimed, HalfEnded, RequestTaken, Role
from support.conductors import CARD, OpenStage, Stage, request
from support.wait import until, until_awaited

REQUEST = RequestId("req-1")


async def claim(
    stage: Stage, worker: str, transfer_id: TransferId, *, request_id: RequestId = REQUEST, is_repeated: bool = False
) -> bool | None:
    """None: nobody knows."""
    question = HalfClaim(
        request_id=request_id, transfer_id=transfer_id, worker=WorkerId(worker), is_repeated=is_repeated
    )
    try:
        answer = await call(stage.client.bus, subjects.CLAIM, question, HalfClaimed, timeout_s=0.5)
    except BusTimeout:
        return None
    return answer.is_held


async def test_a_request_is_its_decode_workers_until_another_has_it(open_stage: OpenStage) -> None:
    stage = await open_stage()
    first = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(first.running))
    conductor = stage.conductors[0]
    open_request = conductor.requests.get(REQUEST)
    assert open_request is not None
    await until(lambda: open_request.is_certain)
    transfer_id = first.decodes[0].transfer_id
    assert await claim(stage, "d1", transfer_id) is True
    assert await claim(stage, "d1", TransferId("xfer-other")) is False
    assert await claim(stage, "d2", transfer_id) is False
    assert await claim(stage, "d1", transfer_id, request_id=RequestId("req-2")) is None

    second = await stage.add_worker("d2", Role.DECODE, "node-b")
    await until(lambda: conductor.members.life_of(WorkerId("d2")) is not None)
    await first.stop_beating()
    await first.bus.publish(subjects.heartbeat(first.worker), encode(Goodbye(worker=first.worker)))
    await until(lambda: bool(second.running))
    await until(lambda: open_request.is_certain)
    assert await claim(stage, "d1", transfer_id) is False
    assert await claim(stage, "d2", second.decodes[0].transfer_id) is True

    await second.end(REQUEST)
    await until(lambda: len(conductor.requests) == 0)
    assert await claim(stage, "d1", transfer_id) is False
    assert await claim(stage, "d2", second.decodes[0].transfer_id) is False


async def test_where_the_owner_says_nothing_others_tell_what_they_heard_it_send(open_stage: OpenStage) -> None:
    stage = await open_stage()
    before, after = TransferId("xfer-1"), TransferId("xfer-2")

    async def sent(worker: str, transfer_id: TransferId) -> None:
        """By a conductor that is gone, and was heard by the one that is here."""
        half = DecodeHalf(
            request_id=REQUEST,
            transfer_id=transfer_id,
            conductor=WorkerId("conductor-gone"),
            model=CARD.name,
            tenant=TenantId("default"),
            root=bytes(32),
            tokens=(1, 2, 3),
            sampling=Sampling(max_tokens=4),
            seed=1,
            reply="nobody",
        )
        headers = {HEADER_SENDER: "conductor-gone"}
        await stage.client.bus.publish(subjects.split_decode(WorkerId(worker)), encode(half), headers=headers)
        await until(lambda: _transfer_of(stage) == transfer_id)

    await sent("gone-1", before)
    assert await claim(stage, "gone-1", before, is_repeated=True) is None
    await sent("gone-2", after)
    assert await claim(stage, "gone-1", before) is None, "its owner may still be there"
    assert await claim(stage, "gone-1", before, is_repeated=True) is False
    assert await claim(stage, "gone-2", after, is_repeated=True) is None
    await sent("gone-1", before)
    assert await claim(stage, "gone-1", after, is_repeated=True) is False, "it has it anew"


async def test_a_request_that_another_conductor_was_given_later_is_let_go_without_a_word(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    first = stage.conductors[0]
    other = await stage.add_conductor("conductor-2")

    async def is_given_to_the_other() -> bool:
        """As after it, or the broker, stood still: the delivery comes again, to either of them."""
        if (held := first.requests.get(REQUEST)) is not None:
            await held.delivery.nak()
        return other.requests.get(REQUEST) is not None

    await until_awaited(is_given_to_the_other)
    await until(lambda: first.requests.get(REQUEST) is None)
    # What is left of it here would say so, now that its worker is gone: the other one does, alone.
    await decode.leave()
    await until(lambda: len(stage.client.ends()) == 1)
    await until(lambda: len(other.requests) == 0)
    assert len(stage.client.ends()) == 1


async def test_who_was_given_a_request_earlier_takes_it_from_nobody(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    conductor = stage.conductors[0]
    held = conductor.requests.get(REQUEST)
    assert held is not None
    for taken in (
        RequestTaken(request_id=REQUEST, conductor=WorkerId("late"), num_delivered=held.delivery.num_delivered),
        RequestTaken(request_id=REQUEST, conductor=WorkerId("conductor-1"), num_delivered=9),
        RequestTaken(request_id=RequestId("req-2"), conductor=WorkerId("other"), num_delivered=9),
    ):
        await announce(stage.client.bus, subjects.TAKEN, taken)
    await decode.end(REQUEST)
    await until(lambda: len(conductor.requests) == 0)
    assert not held.is_taken
    assert len(stage.client.ends()) == 1


def _transfer_of(stage: Stage) -> TransferId | None:
    flight = stage.conductors[0].flights.get(REQUEST)
    return flight.transfer_id if flight is not None else None


async def test_nobody_is_asked_where_no_conductor_is(open_stage: OpenStage) -> None:
    stage = await open_stage()
    await stage.conductors[0].stop()

    async def is_nobody_there() -> bool:
        """Once the broker knows that it has left."""
        try:
            await claim(stage, "d1", TransferId("xfer-1"))
        except NoResponders:
            return True
        return False

    await until_awaited(is_nobody_there)


async def test_what_ended_while_no_conductor_was_there_is_not_run_again(open_stage: OpenStage) -> None:
    stage = await open_stage()
    decode = stage.workers["d1"]
    await stage.client.submit(request())
    await until(lambda: bool(decode.running))
    await stage.conductors[0].stop()
    await decode.end(REQUEST, tells_conductor=False)
    second = await stage.add_conductor("conductor-2")
    # What comes later is served, so the first was not waiting before it.
    await stage.client.submit(msgspec.structs.replace(request(), request_id=RequestId("req-2")))
    await until(lambda: RequestId("req-2") in decode.running)
    assert [half.request_id for half in decode.decodes] == [REQUEST, "req-2"]
    assert second.requests.get(REQUEST) is None
    assert len(stage.client.ends()) == 1


async def test_what_ended_before_a_request_moved_ends_nothing_of_it_now(open_stage: OpenStage) -> None:
    """Prefill lets go of the first transfer when the second half may be on its way to the same worker."""
    stage = await open_stage()
    await stage.client.submit(request())
    await until(lambda: bool(stage.workers["p1"].running))
    conductor = stage.conductors[0]
    open_request = conductor.requests.get(REQUEST)
    assert open_request is not None
    before, other = TransferId("xfer-before"), RequestId("req-other")
    for ended in (
        HalfEnded(request_id=REQUEST, transfer_id=before, worker=WorkerId("p1"), role=Role.PREFILL),
        HalfEnded(request_id=other, transfer_id=before, worker=WorkerId("d1"), role=Role.DECODE),
    ):
        await announce(stage.client.bus, subjects.ended(WorkerId("conductor-1")), ended)
    await until(lambda: conductor.requests.has_ended(other))
    assert open_request.prefill_worker == "p1"
    await stage.workers["p1"].end(REQUEST)
    await until(lambda: open_request.prefill_worker is None)
