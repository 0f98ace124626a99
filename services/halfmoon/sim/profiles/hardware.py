"""Machines of a simulation: published peaks of their GPUs, and the share of them that serving reaches."""

from collections.abc import Mapping
from dataclasses import dataclass

from halfmoon.sim.errors import SimError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    name: str
    source: str
    """Where the peaks are published."""
    peak_flops: float
    """Of one GPU, per second: bfloat16, dense."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    num_gpus: int = 8
    """In one instance, by tensor parallelism."""
    nic_bytes_per_s: float = 100e9
    """Of one instance's node, in each direction."""
    pool_bytes: float = 1e12
    """DRAM of a node for cached KV."""
    flops_share: float = 0.5
    """Of the peak, that prefill reaches."""
    hbm_share: float = 0.7
    """Of the bandwidth, that decode reaches."""
    nic_share: float = 0.8
    memory_share: float = 0.9
    """Of HBM, for weights and KV; the rest is activations."""
    prefill_overhead_s: float = 0.02
    """Of one prompt, whatever its length."""
    step_overhead_s: float = 0.005
    """Of one step: scheduling, kernel launches, and what tensor parallelism waits for."""


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (80 GB SXM)"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet (SXM); tensor figures there are with sparsity, halved here"

HARDWARE: Mapping[str, HardwareProfile] = {
    "A100": HardwareProfile(name="A100", source=_AMPERE, peak_flops=312e12, hbm_bytes_per_s=2.039e12, hbm_bytes=80e9),
    "A800": HardwareProfile(
        name="A800",
        source=f"{_AMPERE}, with less NVLink; NICs as in Mooncake (FAST'25): 800 Gbit/s",
        peak_flops=312e12,
        hbm_bytes_per_s=2.039e12,
        hbm_bytes=80e9,
    ),
    "H100": HardwareProfile(
        name="H100",
        source=f"{_HOPPER}; NICs as in a DGX H100: 8 × 400 Gbit/s",
        peak_flops=989e12,
        hbm_bytes_per_s=3.35e12,
        hbm_bytes=80e9,
        nic_bytes_per_s=400e9,
    ),
    "H200": HardwareProfile(
        name="H200",
        source="NVIDIA H200 Tensor Core GPU data sheet (SXM), tensor figures halved; NICs as in a DGX H200",
        peak_flops=989e12,
        hbm_bytes_per_s=4.8e12,
        hbm_bytes=141e9,
        nic_bytes_per_s=400e9,
    ),
}


def hardware_profile(name: str) -> HardwareProfile:
    """Raises `SimError`."""
    found = HARDWARE.get(name.upper())
    if found is None:
        raise SimError(
            f"there is no hardware {name!r}: expected one of {', '.join(HARDWARE)}, or a file that "
            "`halfmoon sim measure` wrote"
        )
    return found
