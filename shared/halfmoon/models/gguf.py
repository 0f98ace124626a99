"""A GGUF file's metadata under the names that config.json has.

Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>; read with the `gguf` library.
"""

from pathlib import Path
from typing import Any

from halfmoon.models.folder import ModelFolderError

_KEYS = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}


def read_metadata(path: Path) -> dict[str, Any]:
    """Raises `ModelFolderError` where the file is no GGUF, or the library to read it isn't installed."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelFolderError(f"{path} is a GGUF file: reading it needs `pip install 'halfmoon[torch]'`") from None
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelFolderError(f"{path} is no sound GGUF file: {error}") from None

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    config = {ours: value(f"{architecture}.{theirs}") for theirs, ours in _KEYS.items()}
    if config["kv_lora_rank"] is not None:
        config["qk_rope_head_dim"] = value(f"{architecture}.rope.dimension_count")
    pattern = value(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if config["vocab_size"] is None and tokens is not None:
        config["vocab_size"] = len(tokens.data)
    config |= {"model_type": architecture, "eos_token_id": value("tokenizer.ggml.eos_token_id")}
    return {name: found for name, found in config.items() if found is not None}
