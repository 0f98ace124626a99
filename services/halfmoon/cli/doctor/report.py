"""What was found: plain data, as `halfmoon doctor --json` prints it."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from halfmoon.schemas.ids import NodeId, WorkerId
from halfmoon.schemas.probes import Probed, ProbedPath

MAX_CLOCK_DIFFERENCE_S = 0.1
"""Deadlines and leases travel as Unix times: what is more than this apart eats into them."""
MIN_MEMORY_FREE_SHARE = 0.05


class Verdict(StrEnum):
    GOOD = "good"
    WARNING = "warning"
    """It works, but not as it should."""
    BAD = "bad"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    verdict: Verdict
    detail: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody whose heartbeats were heard, or whom the registry holds for alive."""

    worker: WorkerId
    what: str
    """`kv-tier`, `prefill`, `decode`, `colocated`, `gateway`, `conductor`, `registry`."""
    node: NodeId | None = None
    state: str
    is_heard: bool = True
    is_recorded: bool | None = None
    """None where the registry couldn't be asked."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """How `reader` reads from `source`."""

    reader: NodeId
    source: NodeId
    chosen: str | None
    paths: tuple[ProbedPath, ...]
    detail: str = ""

    @property
    def gb_per_s(self) -> float | None:
        """Of the chosen path, where it was measured."""
        return next((path.gb_per_s for path in self.paths if path.transport == self.chosen), None)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    checks: tuple[Check, ...]
    members: tuple[Member, ...] = ()
    pairs: tuple[Pair, ...] = ()

    @property
    def is_well(self) -> bool:
        return all(check.verdict is not Verdict.BAD for check in self.checks)


def judge_members(members: Sequence[Member]) -> Check:
    """Those that are heard and those that the registry has in etcd ought to be the same."""
    silent = [member.worker for member in members if not member.is_heard]
    unknown = [member.worker for member in members if member.is_recorded is False]
    kinds = {member.what for member in members if member.is_heard}
    missing = [what for what in ("kv-tier", "conductor", "gateway", "registry") if what not in kinds]
    if not kinds & {"decode", "colocated"}:
        missing.append("decode")
    if not kinds & {"prefill", "colocated"}:
        missing.append("prefill")
    num_heard = sum(member.is_heard for member in members)
    told = [f"{num_heard} heard"]
    if silent:
        told.append(f"in the registry, but silent: {', '.join(silent)}: they have died, or can't reach NATS")
    if unknown:
        told.append(f"heard, but not in the registry: {', '.join(unknown)}: it records them within a second or two")
    if missing:
        told.append(f"none of these runs: {', '.join(missing)}")
    verdict = Verdict.BAD if silent or not num_heard else Verdict.WARNING if len(told) > 1 else Verdict.GOOD
    return Check(name="members", verdict=verdict, detail="; ".join(told))


def judge_clock(node: NodeId, difference_s: float, uncertainty_s: float) -> Check:
    """`difference_s`: the node's clock minus this one; known to within `uncertainty_s`, either way."""
    detail = f"{1000 * difference_s:+.1f} ms against this machine's, within {1000 * uncertainty_s:.1f} ms"
    if abs(difference_s) - uncertainty_s > MAX_CLOCK_DIFFERENCE_S:
        detail += f": over {1000 * MAX_CLOCK_DIFFERENCE_S:g} ms, deadlines and leases suffer; set it by NTP"
        return Check(name=f"clock of {node}", verdict=Verdict.WARNING, detail=detail)
    return Check(name=f"clock of {node}", verdict=Verdict.GOOD, detail=detail)


def judge_memory(found: Probed) -> Check:
    """Room on the file system that the arena lies on: others on the host need it too."""
    share = found.memory_free_bytes / found.memory_total_bytes if found.memory_total_bytes else 0.0
    detail = (
        f"{found.memory_dir}: {found.memory_free_bytes / 2**20:,.0f} of "
        f"{found.memory_total_bytes / 2**20:,.0f} MiB free"
    )
    if share < MIN_MEMORY_FREE_SHARE:
        detail += ": nearly full; lower arena_bytes, or enlarge it (docker: --shm-size)"
        return Check(name=f"memory of {found.node}", verdict=Verdict.WARNING, detail=detail)
    return Check(name=f"memory of {found.node}", verdict=Verdict.GOOD, detail=detail)


def judge_pairs(pairs: Sequence[Pair], num_nodes: int) -> Check:
    """Every node must be able to read from every other."""
    lost = [f"{pair.reader} from {pair.source}" for pair in pairs if pair.chosen is None]
    if lost:
        detail = f"no way to read: {', '.join(lost)}"
        return Check(name="paths", verdict=Verdict.BAD, detail=detail)
    if num_nodes < 2:
        return Check(name="paths", verdict=Verdict.GOOD, detail=f"{num_nodes} node: nothing is read from elsewhere")
    return Check(name="paths", verdict=Verdict.GOOD, detail=f"{len(pairs)} pairs, each with a way")
