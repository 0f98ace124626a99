"""What is simulated."""

from dataclasses import dataclass

from halfmoon.eviction import PolicyName as EvictionName
from halfmoon.scheduling.policies import PolicyName
from halfmoon.scheduling.slo import AdmissionName
from halfmoon.sim.errors import SimError
from halfmoon.sim.tally import NO_LIMITS, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    prefill: int = 8
    decode: int = 8
    colocated: int = 0
    """Instances that do both, in place of the others."""
    policy: PolicyName = PolicyName.KV_CENTRIC
    balancing_threshold: float | None = None
    """For `kv_centric`. None: it tunes itself."""
    admission: AdmissionName = AdmissionName.NONE
    slo: Slo = NO_LIMITS
    judges_tbt: bool = True
    """Whether admission looks at decode too, not at TTFT alone."""
    second_look: bool = False
    """Decode workers turn away what would break the limit of TBT when its KV has come: its prefill was for nothing."""
    seed: int = 0
    """Policies draw lots by request ids, which it is a part of."""
    cache_tokens: int | None = None
    """Of each node's pool. None: as the hardware has it; 0: none."""
    eviction: EvictionName = EvictionName.PREFIX_AWARE
    index_lag_s: float = 0.002
    """Until what a pool stores or evicts is known where requests are placed."""
    max_batch: int = 256
    step_tokens: int = 2048
    """Budget of a step of chunked prefill."""
    max_waiting: int = 64
    """Per worker; where all have so many in their queues, a request is turned away."""
    joins_s: tuple[float, ...] = ()
    """When one more prefill instance each comes, its pool empty."""

    def check(self) -> None:
        """Raises `SimError`."""
        if self.colocated < 0 or self.prefill < 0 or self.decode < 0:
            raise SimError("numbers of instances can't be negative")
        if self.colocated and self.joins_s:
            raise SimError("--join adds prefill instances; with --colocated there are none")
        if not self.colocated and not (self.prefill and self.decode):
            raise SimError("give at least one instance each with --prefill and --decode, or some with --colocated")
        if self.admission is not AdmissionName.NONE and self.slo == NO_LIMITS:
            raise SimError(
                f"--admission {self.admission} judges by --slo-ttft and --slo-tbt: give at least one of them"
            )
        if self.second_look and self.slo.tbt_s is None:
            raise SimError("--second-look judges by --slo-tbt: give it")
        if self.balancing_threshold is not None and self.balancing_threshold < 1:
            raise SimError(f"the balancing threshold must be at least 1, got {self.balancing_threshold}")
