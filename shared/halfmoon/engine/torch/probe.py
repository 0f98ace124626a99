"""A first step, before anybody is served: whether the model's code does with our KV what we expect of it.

A config tells only what its authors thought of. A model class that has attention of its own, or layers without any,
would ignore the KV and answer wrongly without an error.
"""

import torch
from transformers import PreTrainedModel

from halfmoon.engine.contract import ModelUnsupported
from halfmoon.engine.torch.kv import PagedKV
from halfmoon.engine.torch.runner import Row, Runner
from halfmoon.models.folder import Geometry

_NUM_TOKENS = 2


class _RecordingKV(PagedKV):
    """Remembers which layers have stored keys and values, and of what shape."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.written.append((layer, tuple(keys.shape), tuple(values.shape)))
        super().write(layer, slots, keys, values)

    written: list[tuple[int, tuple[int, ...], tuple[int, ...]]]


def check_pages(model: PreTrainedModel, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ModelUnsupported` unless each layer stores exactly one set of keys and values, as the config says."""
    kv = _RecordingKV(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        num_tokens=_NUM_TOKENS,
        block_tokens=_NUM_TOKENS,
        dtype=dtype,
        device=device,
    )
    kv.written = []
    try:
        Runner(model, kv, device).run([Row([0] * _NUM_TOKENS, 0, kv.take(_NUM_TOKENS), None, ())])
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ModelUnsupported(
            f"the torch engine can't page {geometry.model_type}: a first step failed "
            f"({type(error).__name__}: {error}); serve it with another engine"
        ) from error
    shape = (geometry.num_kv_heads, _NUM_TOKENS, geometry.head_dim)
    if kv.written != [(layer, shape, shape) for layer in range(geometry.num_layers)]:
        layers = sorted({layer for layer, *_ in kv.written})
        raise ModelUnsupported(
            f"the torch engine can't page {geometry.model_type}: of its {geometry.num_layers} layers, "
            f"{len(layers)} keep keys and values of the shape that the config says; serve it with another engine"
        )
