"""What a conductor tells of its own scheduling: for metrics, and for `halfmoon top`."""

import heapq

from halfmoon.conductor.forecasts import Forecasts
from halfmoon.conductor.instruments import Instruments
from halfmoon.scheduling.contract import Policy
from halfmoon.scheduling.costs.fitted import Fit, Fitted
from halfmoon.scheduling.policies import KvCentric, PolicyName
from halfmoon.schemas.scheduling import CostModel, SchedulingReport

MAX_MODELS = 32
"""Told of; those of most samples."""


class Reporter:
    """Of one conductor."""

    def __init__(
        self, name: PolicyName, policy: Policy, fitted: Fitted, forecasts: Forecasts, instruments: Instruments
    ) -> None:
        self._name = name
        self._balance = policy.balance if isinstance(policy, KvCentric) else None
        self._fitted = fitted
        self._forecasts = forecasts
        self._instruments = instruments
        self._models: tuple[CostModel, ...] = ()

    def refresh(self) -> None:
        """To be called every now and then: the models are looked at here, and not for each heartbeat."""
        fits = heapq.nlargest(MAX_MODELS, self._fitted.fits(), key=_samples)
        self._models = tuple(map(_told, fits))
        self._instruments.cost_models(self._models)
        for kind, record in (("ttft", self._forecasts.ttft), ("tbt", self._forecasts.tbt)):
            if (forecast := record.report()) is not None:
                self._instruments.forecast(kind, forecast)
        if self._balance is not None:
            self._instruments.balancing_threshold.set(self._balance.threshold)
            self._instruments.imbalance.set(self._balance.imbalance)

    def report(self, *, num_open: int) -> SchedulingReport:
        balance = self._balance
        return SchedulingReport(
            policy=self._name.value,
            num_placed=self._forecasts.num_placed,
            num_open=num_open,
            num_prompt_chunks=self._forecasts.num_prompt_chunks,
            num_matched_chunks=self._forecasts.num_matched_chunks,
            balancing_threshold=None if balance is None else balance.threshold,
            imbalance=None if balance is None else balance.imbalance,
            ttft=self._forecasts.ttft.report(),
            tbt=self._forecasts.tbt.report(),
            models=self._models,
        )


def _samples(fit: Fit) -> int:
    return fit.num_samples


def _told(fit: Fit) -> CostModel:
    return CostModel(
        kind=fit.kind,
        subject=fit.subject,
        coefficients=fit.coefficients,
        num_samples=fit.num_samples,
        error=fit.error,
    )
