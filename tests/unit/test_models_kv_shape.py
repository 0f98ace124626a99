"""Sizes of KV, by hand: each number here was worked out from the model's published config, not from the code."""

from typing import Any

import pytest

from halfmoon.models import ConfigUnusable, kv_shape
from halfmoon.models.kv_size import LayerKind

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "attention", "bytes_per_token"),
    [
        pytest.param(LLAMA_70B, "grouped-query", 327_680, id="70B"),
        pytest.param({**LLAMA_70B, "num_key_value_heads": None}, "multi-head", 2 * 80 * 64 * 128 * 2, id="multi-head"),
        pytest.param({**LLAMA_70B, "num_key_value_heads": 1}, "multi-query", 2 * 80 * 128 * 2, id="multi-query"),
        pytest.param(DEEPSEEK_V3, "latent (MLA)", 61 * 576 * 2, id="DeepSeek-V3"),
        pytest.param({**DEEPSEEK_V3, "num_hidden_layers": 60}, "latent (MLA)", 69_120, id="DeepSeek-V2"),
        pytest.param({**DEEPSEEK_V3, "index_head_dim": 128}, "latent (MLA)", 61 * 704 * 2, id="with an indexer"),
        pytest.param(
            {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
            "multi-query",
            2 * 40 * 128 * 2,
            id="StarCoder",
        ),
        pytest.param(
            {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, "multi-head", 36_864, id="GPT-2"
        ),
        pytest.param({"model_type": "gemma3", "text_config": LLAMA_70B}, "grouped-query", 327_680, id="with pictures"),
        pytest.param(
            {**LLAMA_70B, "head_dim": 192, "v_head_dim": 128}, "grouped-query", 80 * 8 * 320 * 2, id="v apart"
        ),
        pytest.param(
            {**LLAMA_70B, "num_key_value_heads": [8] * 40 + [0] * 40}, "grouped-query", 163_840, id="heads by layer"
        ),
    ],
)
def test_two_byte_elements(config: dict[str, Any], attention: str, bytes_per_token: int) -> None:
    shape = kv_shape(config)
    assert (shape.attention, shape.bytes_per_token(2)) == (attention, bytes_per_token)
    assert shape.bytes_per_token(4) == 2 * bytes_per_token
    assert shape.bytes_at(131_072, 2) == 131_072 * bytes_per_token


def test_ranks_share_kv_heads_but_each_holds_the_whole_latent() -> None:
    grouped, latent = kv_shape(LLAMA_70B), kv_shape(DEEPSEEK_V3)
    assert [grouped.bytes_per_token(2, ranks) for ranks in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]
    assert [latent.bytes_per_token(2, ranks) for ranks in (1, 8)] == [70_272, 70_272]


def sliding(shape_of: dict[str, Any]) -> list[tuple[LayerKind, int]]:
    return [(group.kind, group.num_layers) for group in kv_shape(shape_of).groups]


def test_windows_bound_what_a_long_sequence_keeps() -> None:
    mistral = {**LLAMA_70B, "model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096}
    shape = kv_shape(mistral)
    per_token = 2 * 32 * 8 * 128 * 2
    assert shape.bytes_per_token(2) == per_token
    assert [shape.bytes_at(n, 2) for n in (1, 4096, 4097, 32_768)] == [per_token, *[4096 * per_token] * 3]
    assert any("all are taken to slide" in each for each in shape.assumptions)

    gemma3 = {**LLAMA_70B, "model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024}
    assert sliding(gemma3) == [(LayerKind.FULL, 10), (LayerKind.SLIDING, 52)]
    one_layer = 2 * 8 * 128 * 2
    assert kv_shape(gemma3).bytes_at(131_072, 2) == one_layer * (10 * 131_072 + 52 * 1024)


@pytest.mark.parametrize(
    ("changes", "num_full", "num_sliding"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 4}, 4, 4),
        ({"model_type": "gemma2"}, 4, 4),
        ({"sliding_window_pattern": 4}, 2, 6),
        ({"sliding_window_pattern": "LLLG"}, 2, 6),
        ({"use_sliding_window": False}, 8, 0),
        ({"use_sliding_window": True, "max_window_layers": 6}, 6, 2),
        ({"sliding_window": None}, 8, 0),
        (
            {
                "layer_types": ["full_attention", "chunked_attention"] * 4,
                "sliding_window": None,
                "attention_chunk_size": 9,
            },
            4,
            4,
        ),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "num_kv_shared_layers": 3}, 2, 3),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], num_full: int, num_sliding: int) -> None:
    groups = dict(sliding({**LLAMA_70B, "num_hidden_layers": 8, "sliding_window": 512, **changes}))
    assert (groups.get(LayerKind.FULL, 0), groups.get(LayerKind.SLIDING, 0)) == (num_full, num_sliding)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2},
        {"layers_block_type": ["mamba", "mamba", "mamba", "attention"] * 2},
        {"hybrid_override_pattern": "M-M*M-M*"},
        {"attn_layer_indices": [3, 7]},
        {"attn_layer_period": 4, "attn_layer_offset": 2},
        {"full_attention_interval": 4, "linear_num_key_heads": 16},
        {"attn_type_list": [0, 0, 0, 1] * 2},
        {"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}},
        {"num_key_value_heads": [0, 0, 0, 8] * 2},
    ],
)
def test_only_layers_with_attention_keep_kv(changes: dict[str, Any]) -> None:
    shape = kv_shape({**LLAMA_70B, "num_hidden_layers": 8, **changes})
    assert shape.bytes_per_token(2) == 2 * 2 * 8 * 128 * 2
    assert shape.attention == "grouped-query"


def test_full_layers_may_have_other_heads() -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "num_hidden_layers": 2}
    wide = kv_shape({**LLAMA_70B, **changes, "global_head_dim": 512, "num_global_key_value_heads": 2})
    assert wide.bytes_per_token(2) == 2 * 2 * (8 * 128 + 2 * 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many'"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers, and says that there are 80"),
        ({"layer_types": ["quantum"] * 80}, "type quantum aren't known"),
        ({"state_size": 16}, r"recurrent layers \(state_size\)"),
        ({"layer_types": ["mamba"] * 80}, "keeps no KV"),
        ({"compress_ratios": [4, 128]}, "compresses"),
        ({"kv_lora_rank": 512}, "no qk_rope_head_dim"),
    ],
)
def test_what_cannot_be_told_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigUnusable, match=message):
        kv_shape({**LLAMA_70B, **changes})
