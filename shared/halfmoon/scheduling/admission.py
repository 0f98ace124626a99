"""Admission: whether a request can be served, and by whom at all. Pure; `policies/` ranks those that can.

request ─ admit ─▶ Rejection, or Candidates (one model card, its workers) ─ Policy.rank ─▶ Plan
"""

from array import array
from collections.abc import Sequence

import numpy as np

from halfmoon.scheduling.cluster import Cluster, WorkerLoad, Workers
from halfmoon.scheduling.contract import Ask, Candidates, Costs
from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role
from halfmoon.schemas.wire import Error, ErrorCode

MAX_NAMED_MODELS = 20


def admit(model: ModelName, ask: Ask, cluster: Cluster, costs: Costs) -> Candidates | Error:
    """Those that can serve the request, or why nobody can."""
    card = card_of(model, cluster)
    if isinstance(card, Error):
        return card
    groups = _groups(model, cluster, ask)
    usable = [group for group in groups if group.decodes and (group.prefills or _needs_no_prefill(ask, group))]
    if not usable:
        missing = "prefill" if any(group.decodes for group in groups) else "decode" if groups else "prefill or decode"
        return Error(
            code=ErrorCode.NO_WORKERS,
            message=f"no {missing} worker serves {model!r} now; start one, or try again when it has come up",
            retry_after_s=costs.retry_after_s,
        )
    fitting = [fits for group in usable if (fits := _fitting(group, ask)) is not None]
    if not fitting:
        limit = max(worker.limit_tokens for group in usable for worker in group.decodes)
        return Error(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=f"the prompt has {ask.num_tokens} tokens; with at least one token of completion, "
            f"{limit} fit: shorten it to {limit - 1}",
        )
    free = [room for group in fitting if (room := _with_room(group, ask, costs)) is not None]
    if not free:
        return Error(
            code=ErrorCode.OVERLOADED,
            message=f"all workers for {model!r} have {costs.max_waiting_per_worker} requests waiting; try again later",
            retry_after_s=costs.retry_after_s,
        )
    if len(free) == 1:
        return free[0]
    # Two groups mean that one model is being replaced by another build of it: the less busy one takes more.
    return min(free, key=lambda group: sum(worker.occupancy for worker in group.decodes) / len(group.decodes))


def card_of(model: ModelName, cluster: Cluster) -> ModelCard | Error:
    """The card of a model that is served now, or was before. An unknown one is told from one that is away."""
    for worker in cluster.workers:
        if worker.card.name == model:
            return worker.card
    if model in cluster.models:
        return cluster.models[model]
    if not cluster.models:
        return Error(code=ErrorCode.NO_WORKERS, message="no worker is there yet; try again when one has come up")
    names = ", ".join(repr(name) for name in sorted(cluster.models)[:MAX_NAMED_MODELS])
    return Error(code=ErrorCode.MODEL_NOT_FOUND, message=f"no model {model!r} is served here; there is {names}")


def check_tokens(tokens: Sequence[int], card: ModelCard) -> Error | None:
    """Why these can't be a prompt of this model; None where they can."""
    if not tokens:
        return Error(code=ErrorCode.INVALID_REQUEST, message="the prompt is empty; give at least one token")
    if not _are_below(card.vocab_size, tokens):
        place, wrong = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < card.vocab_size)
        return Error(
            code=ErrorCode.INVALID_REQUEST,
            message=f"token {place} of the prompt is {wrong}; ids of {card.name!r} go from 0 to {card.vocab_size - 1}",
        )
    return None


def _are_below(limit: int, tokens: Sequence[int]) -> bool:
    """Whether all are numbers from 0 on, below the limit; packed first, since Python compares them one by one."""
    try:
        packed = np.frombuffer(array("I", tokens), np.uintc)
    except OverflowError:
        return False
    return bool(packed.max() < limit)


def max_tokens(requested: int | None, num_prompt_tokens: int, limit_tokens: int) -> int:
    """Completion tokens at most: as requested, but no more than the prompt leaves room for."""
    left = limit_tokens - num_prompt_tokens
    return left if requested is None else min(requested, left)


def _groups(model: ModelName, cluster: Cluster, ask: Ask) -> list[Candidates]:
    groups: list[Candidates] = []
    for group in cluster.groups:
        if group.card.name != model:
            continue
        takers = group.takers
        if ask.has_chunks and not group.prefills:
            takers = Workers(worker for worker in takers if worker.role is Role.COLOCATED) or takers
        groups.append(Candidates(group.card, group.prefills, takers))
    return groups


def _needs_no_prefill(ask: Ask, group: Candidates) -> bool:
    return not ask.has_chunks or all(worker.role is Role.COLOCATED for worker in group.decodes)


def _fitting(group: Candidates, ask: Ask) -> Candidates | None:
    num_tokens = ask.num_tokens
    sides = [Workers.of(side) for side in (group.prefills, group.decodes) if side]
    if all(side.least_limit_tokens > num_tokens for side in sides):
        return group
    return _only(
        group,
        ask,
        tuple(worker for worker in group.prefills if num_tokens < worker.limit_tokens),
        tuple(worker for worker in group.decodes if num_tokens < worker.limit_tokens),
    )


def _with_room(group: Candidates, ask: Ask, costs: Costs) -> Candidates | None:
    most = costs.max_waiting_per_worker
    sides = [Workers.of(side) for side in (group.prefills, group.decodes) if side]
    if all(side.longest_line < most for side in sides):
        return group
    return _only(
        group,
        ask,
        tuple(worker for worker in group.prefills if worker.num_waiting < most),
        tuple(worker for worker in group.decodes if worker.num_waiting < most),
    )


def _only(
    group: Candidates, ask: Ask, prefills: tuple[WorkerLoad, ...], decodes: tuple[WorkerLoad, ...]
) -> Candidates | None:
    """The group with no others than these; None where it can't serve any more."""
    if ask.has_chunks and not prefills:
        decodes = tuple(worker for worker in decodes if worker.role is Role.COLOCATED)
    return Candidates(group.card, Workers(prefills), Workers(decodes)) if decodes else None
