"""The embedded engine: transformers' own model code over a paged KV of ours.

support.py    which models can be paged, and why others can't
weights.py    loading
packed.py     linear layers in the layout that a CPU computes on
kv.py         the paged KV: blocks, and copies to and from chunk payloads
attention.py  the attention function that transformers' layers call
schedule.py   what one step computes (pure)
sampling.py   logits into tokens
runner.py     one step: forward, sample, export
probe.py      a first step, to see whether the model's code uses our KV
engine.py     the engine: sequences, the step thread, and their asyncio side
"""

from halfmoon.engine.torch.config import TorchEngineConfig
from halfmoon.engine.torch.engine import TorchEngine

__all__ = ["TorchEngine", "TorchEngineConfig"]
