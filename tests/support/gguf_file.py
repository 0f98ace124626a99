"""GGUF files of metadata alone: all that sizing reads."""

from pathlib import Path

from gguf import GGUFWriter


def write_gguf(
    path: Path,
    architecture: str,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    key_length: int | None = None,
    kv_lora_rank: int | None = None,
    rope: int | None = None,
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_embedding_length(8 * heads)
    if key_length is not None:
        writer.add_key_length(key_length)
    if kv_lora_rank is not None:
        writer.add_kv_lora_rank(kv_lora_rank)
    if rope is not None:
        writer.add_rope_dimension_count(rope)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
