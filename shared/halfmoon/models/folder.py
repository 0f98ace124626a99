"""A model on disk: a Hugging Face folder with safetensors, or one GGUF file.

Reads what can be known without loading it: geometry from the config, size of the KV, presence and soundness of weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.models.kv_layers import ConfigUnusable, kv_shape
from halfmoon.models.kv_size import KvShape, dtype_bytes

_MAX_HEADER_BYTES = 100 << 20


class ModelFolderError(Exception):
    """The path holds no model that can be used; the message says what is missing or broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The numbers that decide the size of KV and the bounds of requests."""

    model_type: str
    """As in the config: `llama`, `qwen3`, …"""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_tokens: int
    eos_tokens: tuple[int, ...]
    kv: KvShape | ConfigUnusable
    """Or why it isn't known: then an engine may still say so better, and one that only keeps time doesn't care."""

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KV of one token, over all layers.

        Raises ValueError for a dtype that KV can't have, and where the shape of the KV isn't known.
        """
        if isinstance(self.kv, ConfigUnusable):
            raise self.kv
        return self.kv.bytes_per_token(dtype_bytes(dtype))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is there. Made by `open`."""

    path: Path
    config: Mapping[str, Any]
    """config.json; for a GGUF file, its metadata under the same names."""
    geometry: Geometry

    @classmethod
    def open(cls, path: Path) -> "ModelFolder":
        """Raises `ModelFolderError`."""
        if path.is_file() and path.suffix != ".gguf":
            raise ModelFolderError(f"{path} is a file, but no .gguf: give a Hugging Face folder or a GGUF file")
        config = read_config(path)
        return cls(path, config, _geometry(config, _eos_tokens(path, config), path))

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def default_name(self) -> str:
        """The name that users ask for, unless another is set: that of the folder, or of the file."""
        return self.path.stem if self.is_gguf else self.path.resolve().name

    def weight_files(self) -> list[Path]:
        """The files that hold the weights, all of them there and whole. Raises `ModelFolderError`."""
        if self.is_gguf:
            return [self.path]
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = _read_json(index, needed_in=self.path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelFolderError(f"{index} names no weights; fetch the model again")
            names = sorted({str(name) for name in weight_map.values()})
        else:
            names = ["model.safetensors"]
        files = [self.path / name for name in names]
        for file in files:
            if not file.exists():
                raise ModelFolderError(
                    f"{self.path} has no {file.name}: its weights are missing, or aren't safetensors; "
                    "fetch the model again, or save it with save_pretrained"
                )
            _check_safetensors(file)
        return files


def read_config(path: Path) -> Mapping[str, Any]:
    """The config of a Hugging Face folder, of a config.json by itself, or of a GGUF file. Raises `ModelFolderError`."""
    if not path.exists():
        raise ModelFolderError(f"there is no model at {path}: give a Hugging Face folder or a GGUF file")
    if path.is_dir():
        return _read_json(path / "config.json", needed_in=path)
    if path.suffix == ".json":
        return _read_json(path, needed_in=path.parent)
    if path.suffix != ".gguf":
        raise ModelFolderError(f"{path} is no model: give a Hugging Face folder, its config.json, or a GGUF file")
    from halfmoon.models.gguf import read_metadata

    return read_metadata(path)


def _check_safetensors(file: Path) -> None:
    """Whether the file is as long as its header says: a download that was cut short isn't."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelFolderError(f"{file} is no safetensors file, or was cut short; fetch it again")
        try:
            header = json.loads(stream.read(header_bytes))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ModelFolderError(f"{file} has a broken safetensors header; fetch it again") from None
    if size != 8 + header_bytes + end:
        raise ModelFolderError(
            f"{file} has {size:,} bytes where {8 + header_bytes + end:,} were expected; fetch it again"
        )


def _read_json(file: Path, *, needed_in: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelFolderError(
            f"{needed_in} has no {file.name}: it is no Hugging Face model folder; give one, or a GGUF file"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file} holds no JSON object")
    return content


def _geometry(config: Mapping[str, Any], eos_tokens: tuple[int, ...], path: Path) -> Geometry:
    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ModelFolderError(
                f"the config of {path} has no usable {name} (found {value!r}): "
                "it describes no decoder-only language model"
            )
        return value

    num_heads = number("num_attention_heads")
    kv: KvShape | ConfigUnusable
    try:
        kv = kv_shape(config)
    except ConfigUnusable as error:
        kv = error
    return Geometry(
        model_type=str(config.get("model_type", "unknown")),
        num_layers=number("num_hidden_layers"),
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_dim=number("head_dim", number("hidden_size") // num_heads),
        vocab_size=number("vocab_size"),
        max_model_tokens=number("max_position_embeddings"),
        eos_tokens=eos_tokens,
        kv=kv,
    )


def _eos_tokens(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids; those for generation, where the model names them, else the config's."""
    generation = path / "generation_config.json"
    value = config.get("eos_token_id")
    if path.is_dir() and generation.exists():
        value = _read_json(generation, needed_in=path).get("eos_token_id", value)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in tokens):
        raise ModelFolderError(f"the eos_token_id of {path} is {value!r}: expected a token id, or a list of them")
    return tuple(tokens)
