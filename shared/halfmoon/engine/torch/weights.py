"""Loading a model: transformers' class for it, with our attention, from safetensors or GGUF."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from halfmoon.engine.contract import ModelUnsupported
from halfmoon.engine.torch import attention
from halfmoon.engine.torch.packed import can_pack, pack_linears
from halfmoon.engine.torch.support import check_pageable
from halfmoon.models import ModelFolder, ModelFolderError


def load_model(
    model: ModelFolder, *, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
) -> PreTrainedModel:
    """The model, ready for steps. Raises `ModelUnsupported` (before weights are read) or `ModelFolderError`."""
    check_pageable(model.config)
    model.weight_files()
    attention.register()
    progress(0.05)
    with _quiet():
        loaded = _from_gguf(model, dtype) if model.is_gguf else _from_safetensors(model, dtype)
    progress(0.8)
    loaded.to(device)
    loaded.eval()
    loaded.requires_grad_(False)
    _check_attention(loaded, model)
    if can_pack(device, dtype):
        pack_linears(loaded)
    return loaded


def _from_safetensors(model: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
    return _from_pretrained(model, {"pretrained_model_name_or_path": model.path}, dtype)


def _from_gguf(model: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
    where = {"pretrained_model_name_or_path": model.path.parent, "gguf_file": model.path.name}
    config = AutoConfig.from_pretrained(**where, local_files_only=True)
    check_pageable(config.to_dict())
    return _from_pretrained(model, where, dtype)


def _from_pretrained(model: ModelFolder, where: Mapping[str, object], dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            **where, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True, output_loading_info=True
        )
    except (KeyError, ValueError) as error:  # no class for it, or one that doesn't know our attention
        raise ModelUnsupported(
            f"the torch engine can't page {model.geometry.model_type}: transformers' code for it doesn't take an "
            f"attention function ({error}); serve it with another engine"
        ) from error
    except RuntimeError as error:
        raise ModelFolderError(
            f"the weights of {model.path} have other shapes than its config says: fetch it again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise ModelFolderError(f"{model.path} lacks {len(missing)} weights, the first is {missing[0]}: fetch it again")
    return loaded


def _check_attention(loaded: PreTrainedModel, model: ModelFolder) -> None:
    """Whether the class uses the attention interface: one that doesn't would ignore our KV and answer wrongly."""
    supports = getattr(loaded, "_supports_attention_backend", False)
    layers = [module for module in loaded.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    if not supports or not layers:
        raise ModelUnsupported(
            f"the torch engine can't page {model.geometry.model_type}: transformers' code for it doesn't use the "
            "attention interface; serve it with another engine"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers shows bars and remarks of its own while it loads; ours are enough."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
