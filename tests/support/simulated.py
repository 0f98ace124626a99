"""Small simulations: requests made by hand, and slices of the recorded traffic."""

from pathlib import Path
from typing import Any

from halfmoon.engine.sim.timing import Timing
from halfmoon.schemas.ids import ChunkKey, RequestId
from halfmoon.sim.arrivals import Arrivals
from halfmoon.sim.options import SimOptions
from halfmoon.sim.profiles.hardware import hardware_profile
from halfmoon.sim.profiles.machine import Machine, machine
from halfmoon.sim.profiles.models import model_profile
from halfmoon.sim.request import SimRequest
from halfmoon.sim.simulation import Simulation

MOONCAKE = Path(__file__).parents[1] / "data" / "mooncake"
CHUNK = 512

PLAIN = Machine(
    model="plain",
    hardware="by hand",
    timing=Timing(token_s=0.001, step_overhead_s=0.01, step_token_s=0.001, step_context_s=0.00001),
    kv_bytes_per_token=1000,
    kv_tokens=100_000,
    cache_tokens=100_000,
    nic_bytes_per_s=1e9,
)
"""Round numbers, for results by hand."""


def llama() -> Machine:
    return machine(model_profile("llama2-70b"), hardware_profile("A800"))


def asked(number: int, at_s: float, num_tokens: int, num_completion: int, *blocks: int) -> SimRequest:
    return SimRequest(
        request_id=RequestId(f"r{number}"),
        number=number,
        at_s=at_s,
        num_tokens=num_tokens,
        num_completion=num_completion,
        keys=tuple(ChunkKey(block.to_bytes(8, "little")) for block in blocks),
        max_tokens=num_completion,
    )


def traffic(name: str = "conversation", **more: Any) -> Arrivals:
    return Arrivals(path=MOONCAKE / f"{name}_trace.jsonl.xz", **more)


def simulated(
    arrivals: Arrivals | list[SimRequest], machine: Machine, watch: list[SimRequest] | None = None, **options: Any
) -> Simulation:
    """Run to the end. `watch`: gets each request when it has ended."""
    ended = (lambda request: None) if watch is None else watch.append
    simulation = Simulation(SimOptions(**options), machine, CHUNK, ended)
    simulation.run(arrivals)
    return simulation
