"""One instance of a simulation: a model on its GPUs, and the pool and NIC of its node."""

from dataclasses import dataclass

from halfmoon.engine.sim.timing import Timing
from halfmoon.sim.errors import SimError
from halfmoon.sim.profiles.hardware import HardwareProfile
from halfmoon.sim.profiles.models import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    model: str
    hardware: str
    timing: Timing
    kv_bytes_per_token: int
    kv_tokens: int
    """KV that fits into its GPUs beside the weights."""
    cache_tokens: int
    """KV that fits into its node's pool."""
    nic_bytes_per_s: float
    request_s: float = 0.0
    """What services add to a request's first token: messages, decisions, leases, handing KV over."""
    max_model_tokens: int = 1 << 20
    vocab_size: int = 1 << 20
    assumptions: tuple[str, ...] = ()


def machine(model: ModelProfile, hardware: HardwareProfile) -> Machine:
    """Raises `SimError` where the model doesn't fit."""
    flops_per_s = hardware.num_gpus * hardware.peak_flops * hardware.flops_share
    hbm_bytes_per_s = hardware.num_gpus * hardware.hbm_bytes_per_s * hardware.hbm_share
    room_bytes = hardware.num_gpus * hardware.hbm_bytes * hardware.memory_share - model.weight_bytes
    kv_tokens = int(room_bytes // model.kv_bytes_per_token)
    if kv_tokens < 1:
        raise SimError(
            f"{model.name} has {model.weight_bytes / 1e9:.0f} GB of weights, which leave no room for KV on "
            f"{hardware.num_gpus} × {hardware.name}"
        )
    return Machine(
        model=model.name,
        hardware=f"{hardware.num_gpus} × {hardware.name}",
        timing=Timing.roofline(
            prefill_overhead_s=hardware.prefill_overhead_s,
            step_overhead_s=hardware.step_overhead_s,
            token_s=model.flops_per_token / flops_per_s,
            weights_s=model.weight_bytes / hbm_bytes_per_s,
            pair_s=model.flops_per_pair / flops_per_s,
            context_s=model.kv_bytes_per_token / hbm_bytes_per_s,
        ),
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_tokens=kv_tokens,
        cache_tokens=int(hardware.pool_bytes // model.kv_bytes_per_token),
        nic_bytes_per_s=hardware.nic_bytes_per_s * hardware.nic_share,
        max_model_tokens=model.max_model_tokens,
        vocab_size=model.vocab_size,
        assumptions=(
            *model.assumptions,
            f"{hardware.flops_share:.0%} of the peak FLOP/s, {hardware.hbm_share:.0%} of HBM's and "
            f"{hardware.nic_share:.0%} of the NICs' bandwidth are reached",
            f"peaks: {hardware.source}",
        ),
    )
