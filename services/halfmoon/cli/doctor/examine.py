"""Asking a running cluster: who is there, whether they are well, and how its nodes read from each other."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call
from halfmoon.bus.errors import BusError, Undecodable
from halfmoon.bus.protocol import Bus, BusMessage
from halfmoon.cli.doctor.report import (
    Check,
    Member,
    Pair,
    Report,
    Verdict,
    judge_clock,
    judge_members,
    judge_memory,
    judge_pairs,
)
from halfmoon.schemas import subjects
from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.members import (
    HEARTBEAT_INTERVAL_S,
    Goodbye,
    Heartbeat,
    NodeHeartbeat,
    ServiceHeartbeat,
    WorkerHeartbeat,
)
from halfmoon.schemas.probes import Probe, Probed
from halfmoon.schemas.registry import MemberList, Members

_CALL_S = 3.0
_NUM_TRANSPORTS = 4
"""At most; a probe's answer is waited for as long as each may take."""

LivingHeartbeat = WorkerHeartbeat | NodeHeartbeat | ServiceHeartbeat
Progress = Callable[[str], None]
"""Told what is being done now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is done to find out."""

    listen_s: float = 4 * HEARTBEAT_INTERVAL_S
    probe_bytes: int = 256 << 20
    """Per pair and transport; 0 measures nothing."""
    probe_s: float = 1.0


async def examine(bus: Bus, effort: Effort, progress: Progress) -> Report:
    """Everything, in order: later steps need what earlier ones found. Bounded; raises nothing but `CancelledError`."""
    checks: list[Check] = []
    progress("asking the broker")
    checks.append(await _broker(bus))
    if checks[-1].verdict is Verdict.BAD:
        return Report(checks=tuple(checks))
    progress("listening to heartbeats")
    heard = await _heartbeats(bus, effort.listen_s)
    progress("asking the registry")
    check, recorded = await _registry(bus)
    checks.append(check)
    members = _members(heard, recorded)
    checks.append(judge_members(members))
    nodes = sorted(beat.node for beat in heard.values() if isinstance(beat, NodeHeartbeat))
    for node in nodes:
        progress(f"asking node {node}")
        checks += await _node(bus, node)
    pairs: list[Pair] = []
    for reader in nodes:
        for source in nodes:
            if reader != source:
                progress(f"node {reader} reads from {source}")
                pairs.append(await _pair(bus, reader, source, effort))
    checks.append(judge_pairs(pairs, len(nodes)))
    return Report(checks=tuple(checks), members=tuple(members), pairs=tuple(pairs))


async def _broker(bus: Bus) -> Check:
    before_s = time.monotonic()
    try:
        await bus.flush(_CALL_S)
    except BusError as error:
        return Check(name="NATS", verdict=Verdict.BAD, detail=str(error))
    return Check(name="NATS", verdict=Verdict.GOOD, detail=f"round trip {1000 * (time.monotonic() - before_s):.1f} ms")


async def _heartbeats(bus: Bus, listen_s: float) -> dict[WorkerId, LivingHeartbeat]:
    """The last of each member that was heard."""
    decoder: Decoder[Heartbeat] = Decoder(Heartbeat)
    heard: dict[WorkerId, LivingHeartbeat] = {}

    async def hear(message: BusMessage) -> None:
        try:
            beat = decoder.decode(message.data, message.headers)
        except Undecodable:
            return  # of another version: whoever sent it isn't counted
        if isinstance(beat, Goodbye):
            heard.pop(beat.worker, None)
        else:
            heard[beat.worker] = beat

    subscription = await bus.subscribe(subjects.HEARTBEAT_ALL, hear)
    try:
        await asyncio.sleep(listen_s)
    finally:
        await subscription.unsubscribe()
    return heard


async def _registry(bus: Bus) -> tuple[Check, dict[WorkerId, LivingHeartbeat] | None]:
    """Its answer comes from etcd, so it tells about both."""
    before_s = time.monotonic()
    try:
        found = await call(bus, subjects.registry("members"), Members(), MemberList, timeout_s=_CALL_S)
    except BusError as error:
        return Check(name="registry and etcd", verdict=Verdict.BAD, detail=str(error)), None
    detail = f"{len(found.members)} members recorded, answer in {1000 * (time.monotonic() - before_s):.1f} ms"
    recorded = {member.worker: member for member in found.members}
    return Check(name="registry and etcd", verdict=Verdict.GOOD, detail=detail), recorded


def _members(heard: dict[WorkerId, LivingHeartbeat], recorded: dict[WorkerId, LivingHeartbeat] | None) -> list[Member]:
    everybody = (recorded or {}) | heard
    members = [
        Member(
            worker=worker,
            what=_what(beat),
            node=None if isinstance(beat, ServiceHeartbeat) else beat.node,
            state=beat.state.value,
            is_heard=worker in heard,
            is_recorded=None if recorded is None else worker in recorded,
        )
        for worker, beat in everybody.items()
    ]
    return sorted(members, key=lambda member: (member.what, member.worker))


def _what(beat: LivingHeartbeat) -> str:
    if isinstance(beat, NodeHeartbeat):
        return "kv-tier"
    return beat.role.value if isinstance(beat, WorkerHeartbeat) else beat.service


async def _node(bus: Bus, node: NodeId) -> list[Check]:
    """Its clock, halfway between question and answer, and the room it has."""
    before_ns = time.time_ns()
    try:
        found = await call(bus, _verb(node), Probe(), Probed, timeout_s=_CALL_S)
    except BusError as error:
        return [Check(name=f"node {node}", verdict=Verdict.BAD, detail=f"it beats, but does not answer: {error}")]
    after_ns = time.time_ns()
    difference_s = (found.now_ns - (before_ns + after_ns) / 2) / 1e9
    return [judge_clock(node, difference_s, (after_ns - before_ns) / 2e9), judge_memory(found)]


async def _pair(bus: Bus, reader: NodeId, source: NodeId, effort: Effort) -> Pair:
    request = Probe(peer=source, num_bytes=effort.probe_bytes, time_limit_s=effort.probe_s)
    timeout_s = _CALL_S * 4 + _NUM_TRANSPORTS * 2 * effort.probe_s
    try:
        found = await call(bus, _verb(reader), request, Probed, timeout_s=timeout_s)
    except BusError as error:
        detail = f"node {reader} does not answer: {error}"
        return Pair(reader=reader, source=source, chosen=None, paths=(), detail=detail)
    return Pair(reader=reader, source=source, chosen=found.chosen, paths=found.paths, detail=found.detail)


def _verb(node: NodeId) -> str:
    return f"{subjects.kv_tier(node)}.probe"
