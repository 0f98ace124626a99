"""The simulated engine: a timing model behind the engine contract, for tests of control alone. It computes no model."""

from halfmoon.engine.sim.engine import SIM_KV_BYTES_PER_TOKEN, SimEngine, SimEngineConfig

__all__ = ["SIM_KV_BYTES_PER_TOKEN", "SimEngine", "SimEngineConfig"]
