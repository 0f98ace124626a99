"""Requests go to the cache, as far as that is quicker than computing elsewhere.

For each prefill worker, the estimated time until the prompt's KV is there:

    (tokens queued there + tokens left to compute) / its speed  +  bytes to pull / bandwidth

A prefix that lies on its own node or is hot in its engine costs nothing, one on another node a pull, the rest is
computed; so a long match wins only until its worker's queue costs more than the match saves. Where every prompt begins
alike, load still spreads.

A decode worker pulls what isn't hot in its engine. One that has all whole chunks hot may do without prefill, if it
begins at once: what is hot now may be gone by the time that others have ended.
"""

import zlib

from halfmoon.scheduling.cluster import WorkerLoad
from halfmoon.scheduling.contract import Ask, Candidates, Costs, DecodeChoice, Plan, PrefillChoice
from halfmoon.schemas.ids import NodeId
from halfmoon.schemas.model import ModelCard
from halfmoon.schemas.splits import Role

FULL_BATCH_COST_S = 0.5
"""What a decode worker at its limit costs, against an idle one: a whole batch slows each step by about this, in sum."""
NO_ROOM_COST_S = 10.0
"""A request that finds no KV has to wait for another one's end."""


class PrefixAffinity:
    def rank(self, ask: Ask, candidates: Candidates, costs: Costs, turn: int) -> Plan:
        card = candidates.card
        leading = {worker.node: ask.match.num_leading(worker.node) for worker in candidates.prefills}
        held = {node: ask.match.num_held(node) for node in leading}
        prefills: tuple[PrefillChoice, ...] = ()
        if ask.has_chunks:
            choices = [_prefill(ask, worker, card, costs, leading, held) for worker in candidates.prefills]
            choices.sort(key=lambda choice: (choice.cost_s, choice.worker.occupancy, _lot(ask, choice.worker)))
            prefills = tuple(choices)
        decodes = [_decode(ask, worker, card, costs, prefills) for worker in candidates.decodes]
        decodes.sort(key=lambda choice: (choice.cost_s, _lot(ask, choice.worker)))
        return Plan(card, prefills, tuple(decodes), _reason(ask, prefills, decodes[0]))


def _prefill(
    ask: Ask,
    worker: WorkerLoad,
    card: ModelCard,
    costs: Costs,
    leading: dict[NodeId, int],
    held: dict[NodeId, int],
) -> PrefillChoice:
    speed = worker.prefill_tokens_per_s or costs.prefill_tokens_per_s
    chunk_compute_s = card.chunk_tokens / speed
    chunk_pull_s = card.chunk_tokens * card.kv_bytes_per_token / costs.pull_bytes_per_s
    num_reused, num_pulled = leading[worker.node], 0
    num_hot = ask.num_hot(worker.worker)
    num_there = max(num_reused, num_hot)
    if len(ask.match) > num_there:
        pulled = len(ask.match) - held[worker.node]
        if pulled * chunk_pull_s < (len(ask.match) - num_there) * chunk_compute_s:
            num_reused, num_pulled = len(ask.match), pulled
    left_tokens = ask.num_tokens - max(num_reused, num_hot) * card.chunk_tokens
    cost_s = (worker.queued_tokens + left_tokens) / speed + num_pulled * chunk_pull_s
    return PrefillChoice(worker=worker, num_reused=num_reused, num_pulled=num_pulled, num_hot=num_hot, cost_s=cost_s)


def _decode(
    ask: Ask, worker: WorkerLoad, card: ModelCard, costs: Costs, prefills: tuple[PrefillChoice, ...]
) -> DecodeChoice:
    num_hot = ask.num_hot(worker.worker)
    is_alone = False
    cost_s = FULL_BATCH_COST_S * worker.occupancy
    left = worker.limit_tokens - ask.num_tokens
    needed = ask.num_tokens + min(left, ask.max_tokens if ask.max_tokens is not None else left)
    if worker.total_tokens and needed > worker.free_tokens:
        cost_s += NO_ROOM_COST_S * needed / worker.total_tokens
    elif worker.total_tokens:
        cost_s += FULL_BATCH_COST_S * (1 - worker.free_tokens / worker.total_tokens)
    if worker.role is Role.COLOCATED:
        own = {worker.node: ask.match.num_leading(worker.node)}
        held = {worker.node: ask.match.num_held(worker.node)}
        cost_s += _prefill(ask, worker, card, costs, own, held).cost_s
    elif prefills:
        left_tokens = ask.num_tokens - num_hot * card.chunk_tokens
        handover_s = prefills[0].cost_s
        if prefills[0].worker.node != worker.node:
            handover_s += left_tokens * card.kv_bytes_per_token / costs.pull_bytes_per_s
        alone_s = (worker.queued_tokens + left_tokens) / (worker.prefill_tokens_per_s or costs.prefill_tokens_per_s)
        begins_now = not worker.num_waiting and (not worker.total_tokens or needed <= worker.free_tokens)
        is_alone = begins_now and num_hot > 0 and left_tokens < card.chunk_tokens and alone_s <= handover_s
        cost_s += alone_s if is_alone else handover_s
    return DecodeChoice(worker=worker, cost_s=cost_s, num_hot=num_hot, is_alone=is_alone)


def _lot(ask: Ask, worker: WorkerLoad) -> int:
    """Equals are drawn by lot, the same for every conductor: else all would begin with the same worker."""
    return zlib.crc32(f"{ask.request_id}\0{worker.worker}".encode())


def _reason(ask: Ask, prefills: tuple[PrefillChoice, ...], decode: DecodeChoice) -> str:
    if decode.is_colocated:
        return f"colocated on {decode.worker.node}"
    if decode.is_alone:
        return f"all {decode.num_hot} chunks are hot at {decode.worker.worker}"
    if not prefills:
        return "nothing to prefill"
    best = prefills[0]
    return (
        f"{best.num_reused} of {len(ask.match)} matched chunks reused, {best.num_pulled} of them pulled, "
        f"{best.num_hot} hot; "
        f"{best.worker.queued_tokens} tokens queued ahead; estimated {best.cost_s * 1000:.0f} ms"
    )
