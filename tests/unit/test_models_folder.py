"""Models on disk: what is found, what is refused and how, and what makes two of them the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmoon.engine.factory import EngineSettings, EngineUnavailable, build_engine, kv_bytes_per_token
from halfmoon.models import ModelFolder, ModelFolderError
from halfmoon.models.fingerprint import fingerprint
from support.tiny_models import TINY, tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def change_config(model: Path, **changes: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_geometry(model: Path) -> None:
    folder = ModelFolder.open(model)
    geometry = folder.geometry
    assert geometry.model_type == "llama"
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (3, 2, 8)
    assert geometry.vocab_size == TINY["vocab_size"]
    assert geometry.max_model_tokens == 512
    assert geometry.eos_tokens == (2,)
    assert geometry.kv_bytes_per_token("float32") == 2 * 3 * 2 * 8 * 4 == kv_bytes_per_token("torch", model, "auto")
    assert geometry.kv_bytes_per_token("bfloat16") == geometry.kv_bytes_per_token("float16") == 2 * 3 * 2 * 8 * 2
    assert folder.default_name == "tiny"
    assert not folder.is_gguf
    assert [file.name for file in folder.weight_files()] == ["model.safetensors"]


def test_what_configs_leave_out_follows_from_the_rest(model: Path) -> None:
    change_config(model, head_dim=None, num_key_value_heads=None, eos_token_id=[2, 7])
    (model / "generation_config.json").unlink()
    geometry = ModelFolder.open(model).geometry
    assert (geometry.num_kv_heads, geometry.head_dim) == (4, 8)
    assert geometry.eos_tokens == (2, 7)


def test_end_tokens_are_those_for_generation_where_it_names_some(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert ModelFolder.open(model).geometry.eos_tokens == (5, 6)


def test_latent_attention_has_one_entry_a_layer_and_unknown_layers_no_size(model: Path) -> None:
    change_config(model, kv_lora_rank=16, qk_rope_head_dim=4)
    assert kv_bytes_per_token("vllm", model, "bfloat16") == 3 * (16 + 4) * 2
    change_config(model, layer_types=["quantum"] * 3)
    assert ModelFolder.open(model).geometry.num_layers == 3
    with pytest.raises(ModelFolderError, match="layers of type quantum aren't known"):
        kv_bytes_per_token("vllm", model, "bfloat16")


def test_unknown_dtypes_and_engines_are_named(model: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"'int3' is unknown; use float32, bfloat16, float16"):
        kv_bytes_per_token("torch", model, "int3")
    with pytest.raises(EngineUnavailable, match=r"no engine 'magic'; choose one of torch, vllm, sim"):
        kv_bytes_per_token("magic", model, "auto")
    with pytest.raises(EngineUnavailable, match=r"no engine 'magic'; choose one of torch, vllm, sim"):
        build_engine("magic", EngineSettings(model=model, name="tiny", chunk_tokens=8))


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_bytes(content)

    return change


def truncate(name: str, num_bytes: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        os.truncate(model / name, num_bytes)

    return change


def config(**changes: object) -> Callable[[Path], None]:
    return lambda model: change_config(model, **changes)


def cut_last_byte(model: Path) -> None:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def shard_missing(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"there is no model at .*tiny: give a Hugging Face folder or a GGUF file"),
        (remove("config.json"), r"has no config\.json: it is no Hugging Face model folder"),
        (write("config.json", b"{"), r"config\.json can't be read"),
        (write("config.json", b"\xff\xfe"), r"config\.json can't be read"),
        (write("config.json", b"[]"), r"config\.json holds no JSON object"),
        (write("config.json", b"{}"), r"no usable num_attention_heads .*describes no decoder-only language model"),
        (config(num_hidden_layers="many"), r"no usable num_hidden_layers \(found 'many'\)"),
        (config(num_hidden_layers=True), r"no usable num_hidden_layers \(found True\)"),
        (config(num_attention_heads=0), r"no usable num_attention_heads \(found 0\)"),
        (
            write("generation_config.json", b'{"eos_token_id": ["</s>"]}'),
            r"eos_token_id of .* is \['</s>'\]: expected a token id, or a list of them",
        ),
        (remove("model.safetensors"), r"has no model\.safetensors: its weights are missing"),
        (shard_missing, r"has no model-00002-of-00002\.safetensors"),
        (write("model.safetensors.index.json", b'{"weight_map": []}'), r"index\.json names no weights"),
        (cut_last_byte, r"has [\d,]+ bytes where [\d,]+ were expected; fetch it again"),
        (truncate("model.safetensors", 100), r"cut short; fetch it again"),
        (truncate("model.safetensors", 0), r"no safetensors file, or was cut short"),
        (write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), r"no safetensors file"),
        (write("model.safetensors", (9).to_bytes(8, "little") + b'{"a":"b"}'), r"broken safetensors header"),
        (write("model.safetensors", (9).to_bytes(8, "little") + b'["a","b"]'), r"broken safetensors header"),
    ],
)
def test_broken_folders_are_refused_with_what_to_do(model: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(model)
    with pytest.raises(ModelFolderError, match=message):
        ModelFolder.open(model).weight_files()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all" * 100, b"GGUF\x03\x00\x00\x00" + 60 * b"\xff"])
def test_broken_gguf_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"broken\.gguf is no sound GGUF file"):
        ModelFolder.open(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelFolderError, match=r"no \.gguf"):
        ModelFolder.open(file)


def test_the_fingerprint_is_of_the_content_not_of_the_name(model: Path, tmp_path: Path) -> None:
    first = fingerprint(ModelFolder.open(model))
    assert len(bytes.fromhex(first)) == 32
    assert fingerprint(ModelFolder.open(Path(shutil.copytree(model, tmp_path / "other")))) == first
    assert fingerprint(ModelFolder.open(model)) == first, "and so from the note beside the model"
    (model / "README.md").write_text("prose")
    assert fingerprint(ModelFolder.open(model)) == first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("place", [0.3, 0.99])
def test_the_fingerprint_changes_with_any_byte(model: Path, name: str, place: float) -> None:
    folder = ModelFolder.open(model)
    first = fingerprint(folder)
    file = model / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert fingerprint(folder) != first
