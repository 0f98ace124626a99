"""Whether a worker that starts will find partners that it can pass KV to, or take it from.

A prefill and a decode worker can work together only where their KV is alike in every field of `KV_FIELDS`. Where all
workers of the other role have other KV, each transfer would fail: so the one that came later doesn't start.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from halfmoon.bus.codec import Decoder
from halfmoon.bus.errors import Undecodable
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import WorkerId
from halfmoon.schemas.members import Goodbye, Heartbeat, MemberState, WorkerHeartbeat
from halfmoon.schemas.model import KV_FIELDS, ModelCard
from halfmoon.schemas.splits import Role

_COMPLEMENTS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The worker that is about to serve."""

    worker: WorkerId
    role: Role
    started_ns: int
    card: ModelCard


def kv_differences(one: ModelCard, other: ModelCard) -> dict[str, tuple[str | int, str | int]]:
    """The fields that keep two workers from passing KV to each other, with both values; empty where they can."""
    return {
        name: (mine, theirs)
        for name, mine, theirs in zip(KV_FIELDS, one.kv_identity, other.kv_identity, strict=True)
        if mine != theirs
    }


def unfit(newcomer: Newcomer, others: Iterable[WorkerHeartbeat]) -> str | None:
    """Why this worker can't work with any of those that are there; None where it can, or nobody is there yet.

    Of two that start at the same time, the later one gives way. Colocated workers need no partner.
    """
    wanted = _COMPLEMENTS.get(newcomer.role)
    if wanted is None:
        return None
    there = [
        (beat, beat.card)
        for beat in others
        if beat.card is not None
        and beat.role is wanted
        and beat.worker != newcomer.worker
        and beat.card.name == newcomer.card.name
        and _counts(beat, newcomer)
    ]
    if not there or any(card.kv_identity == newcomer.card.kv_identity for _, card in there):
        return None
    nearest, card = min(there, key=lambda each: (len(kv_differences(newcomer.card, each[1])), each[0].worker))
    differing = "; ".join(
        f"{name} is {_shown(mine)} here, {_shown(theirs)} there"
        for name, (mine, theirs) in kv_differences(newcomer.card, card).items()
    )
    return (
        f"this {newcomer.role} worker and the {wanted} worker {nearest.worker} (one of {len(there)}) serve "
        f"{newcomer.card.name!r} with KV that they can't exchange: {differing}. Start both with the same model files, "
        "engine and its version, dtype and chunk_tokens; or, to replace the model's workers one after the other, set "
        f"allow_other_kv (HALFMOON_{newcomer.role.upper()}_ALLOW_OTHER_KV=true): this one then waits for its like"
    )


def _counts(beat: WorkerHeartbeat, newcomer: Newcomer) -> bool:
    match beat.state:
        case MemberState.SERVING:
            return True
        case MemberState.LOADING:
            return (beat.started_ns, beat.worker) < (newcomer.started_ns, newcomer.worker)
        case MemberState.DRAINING:
            return False


async def roll_call(bus: Bus, listen_s: float) -> list[WorkerHeartbeat]:
    """The workers heard in this time, with the last that each said; those that said goodbye are left out."""
    decoder: Decoder[Heartbeat] = Decoder(Heartbeat)
    beats: dict[WorkerId, WorkerHeartbeat] = {}

    async def hear(message: BusMessage) -> None:
        try:
            beat = decoder.decode(message.data, message.headers)
        except Undecodable:
            return
        if isinstance(beat, WorkerHeartbeat):
            beats[beat.worker] = beat
        elif isinstance(beat, Goodbye):
            beats.pop(beat.worker, None)

    subscription = await bus.subscribe(subjects.HEARTBEAT_ALL, hear)
    try:
        await asyncio.sleep(listen_s)
    finally:
        await subscription.unsubscribe()
    return list(beats.values())


def _shown(value: str | int) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 20 else str(value)
