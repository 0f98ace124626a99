"""Admission by SLO: a request whose first token would come too late, or whose tokens too slowly, is refused at once.

After Mooncake, arXiv 2407.00079v3 §7. `early` judges decode by the load at the request's arrival. That load is stale
when its prefill is done: while prompts are being computed decode looks idle and all are admitted, then they all come,
and none is (§7.3: the load oscillates). `predictive` judges by the load at the time when this decode would begin.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from halfmoon.scheduling.contract import Ask, DecodeChoice, Plan
from halfmoon.scheduling.estimates import Estimates
from halfmoon.scheduling.outlook import Batch, Outlook
from halfmoon.scheduling.service_class import ServiceClass
from halfmoon.schemas.wire import Error, ErrorCode

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 60.0


class AdmissionName(StrEnum):
    NONE = "none"
    EARLY = "early"
    PREDICTIVE = "predictive"


class Limit(StrEnum):
    """What a request would break."""

    TTFT = "ttft"
    TBT = "tbt"


_WORDS = {Limit.TTFT: "time to first token", Limit.TBT: "time between tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """Why a request isn't admitted."""

    limit: Limit
    predicted_s: float
    limit_s: float
    retry_after_s: float

    def error(self, class_name: str) -> Error:
        return Error(
            code=ErrorCode.OVERLOADED,
            message=f"the {_WORDS[self.limit]} would be {self.predicted_s:.3g} s, and class {class_name!r} allows "
            f"{self.limit_s:.3g} s; try again later",
            retry_after_s=self.retry_after_s,
        )


def first_token_s(plan: Plan, decode: DecodeChoice) -> float:
    """Predicted seconds from placing to the first token, by this one of the plan's decode choices."""
    if decode.ttft_s is not None:
        return decode.ttft_s
    prefill_s = plan.prefills[0].cost_s if plan.prefills and decode.needs_prefill else 0.0
    return prefill_s + (decode.tbt_s or 0.0)


class Admission:
    """Judges plans, for one conductor or one simulation."""

    def __init__(self, name: AdmissionName, estimates: Estimates, outlook: Outlook) -> None:
        self.name = name
        self._estimates = estimates
        self._outlook = outlook

    def judge(self, plan: Plan, ask: Ask, service: ServiceClass, now_s: float, waited_s: float = 0.0) -> Plan | Breach:
        """The plan, with the first decode choice in front that keeps the limits; or what even the best would break.

        `waited_s`: what has passed of the request's time to first token already.
        """
        if self.name is AdmissionName.NONE or (service.ttft_s is None and service.tbt_s is None):
            return plan
        breaches: list[Breach] = []
        for decode in plan.decodes:
            ttft_s = first_token_s(plan, decode)
            breach = self.late(waited_s + ttft_s, service) or self._slow(decode, ask, service, now_s, ttft_s)
            if breach is None:
                rest = tuple(each for each in plan.decodes if each is not decode)
                return plan if decode is plan.decodes[0] else replace(plan, decodes=(decode, *rest))
            breaches.append(breach)
        return min(breaches, key=lambda breach: breach.retry_after_s)

    def late(self, ttft_s: float, service: ServiceClass) -> Breach | None:
        """Whether a first token after so long would be too late. Queues shrink by a second in each second."""
        if self.name is AdmissionName.NONE or service.ttft_s is None or ttft_s <= service.ttft_s:
            return None
        return _breach(Limit.TTFT, ttft_s, service.ttft_s, ttft_s - service.ttft_s)

    def tbt_s(self, decode: DecodeChoice, ask: Ask, now_s: float, ttft_s: float) -> float:
        """Predicted seconds between tokens, with this request in the batch, `ttft_s` from now."""
        if self.name is AdmissionName.PREDICTIVE:
            return self._tbt_s(decode, ask, self._outlook.at(decode.worker.worker, now_s + ttft_s, now_s))
        return self.tbt_now_s(decode, ask)

    def tbt_now_s(self, decode: DecodeChoice, ask: Ask) -> float:
        """The same by the load of the moment: `early`, or a second look when the prompt's KV is there."""
        return self._tbt_s(decode, ask, self._outlook.now(decode.worker.worker))

    def _tbt_s(self, decode: DecodeChoice, ask: Ask, batch: Batch) -> float:
        return self._estimates.tbt_s(
            decode.worker, 1 + round(batch.num_requests), ask.num_tokens + round(batch.context_tokens)
        )

    def _slow(
        self, decode: DecodeChoice, ask: Ask, service: ServiceClass, now_s: float, ttft_s: float
    ) -> Breach | None:
        if service.tbt_s is None:
            return None
        tbt_s = self.tbt_s(decode, ask, now_s, ttft_s)
        if tbt_s <= service.tbt_s:
            return None
        return _breach(
            Limit.TBT, tbt_s, service.tbt_s, self._until_lighter_s(decode, ask, service.tbt_s, now_s, ttft_s)
        )

    def _until_lighter_s(self, decode: DecodeChoice, ask: Ask, limit_s: float, now_s: float, ttft_s: float) -> float:
        """Seconds until a request like this would be admitted, if no other came: to a factor of two."""
        judged_s = now_s + ttft_s if self.name is AdmissionName.PREDICTIVE else now_s
        wait_s = MIN_RETRY_AFTER_S
        while wait_s < MAX_RETRY_AFTER_S:
            batch = self._outlook.at(decode.worker.worker, judged_s + wait_s, now_s)
            if self._tbt_s(decode, ask, batch) <= limit_s:
                return wait_s
            wait_s *= 2.0
        return MAX_RETRY_AFTER_S


def _breach(limit: Limit, predicted_s: float, limit_s: float, retry_after_s: float) -> Breach:
    retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, retry_after_s))
    return Breach(limit=limit, predicted_s=predicted_s, limit_s=limit_s, retry_after_s=retry_after_s)
