"""Turns a GGUF file into a Hugging Face folder: `python -m halfmoon.models.convert FILE.gguf FOLDER`.

A program of its own, so that whoever fetches a model needn't import torch. Workers then map the safetensors: they start
faster than from GGUF, and two on one machine share the pages.
"""

import sys
from pathlib import Path


def convert(source: Path, target: Path) -> None:
    """Dequantize to fp32 and save with tokenizer and chat template. `target` must not exist."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**where)
    # A model that came from GGUF refuses to be saved: its config remembers the quantization. A fresh one doesn't.
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = torch.float32
    if config.model_type == "llama" and "rms_norm_eps" not in config.to_dict():
        config.rms_norm_eps = 1e-5
    config.rms_norm_eps = round(float(config.rms_norm_eps), 8)  # GGUF stores it as a float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if tokenizer.eos_token_id is not None:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m halfmoon.models.convert FILE.gguf FOLDER")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
