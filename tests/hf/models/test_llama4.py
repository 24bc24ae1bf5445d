"""Llama 4's config.json as published, and what of it is refused in either direction."""

from __future__ import annotations

from typing import Any

import pytest

from petatron.base.errors import ConfigError
from petatron.models.hf import from_hf_config, to_hf_config
from petatron.models.registry import model_spec
from petatron.validate import load_config

# The settings of the text model of meta-llama/Llama-4-Scout-17B-16E.
SCOUT: dict[str, Any] = {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "no_rope_layers": [], "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip


def test_scout():
    model, moe = from_hf_config(SCOUT)
    assert model["no_rope_freq"] == str([0, 0, 0, 1] * 12) and model["attention_chunk_size"] == 8192
    assert (model["attention_temperature_scale"], model["attention_temperature_floor"]) == (0.1, 8192)
    assert model["qk_l2_norm"] and model["rotary_interleaved"] and model["use_rope_scaling"]
    assert moe["moe_apply_probs_on_input"] and moe["moe_router_topk"] == 1 and moe["moe_layer_freq"] == "1"
    assert moe["moe_shared_expert_intermediate_size"] == moe["moe_ffn_hidden_size"] == 8192


def test_maverick_has_experts_in_every_second_layer():
    model, moe = from_hf_config(
        {**SCOUT, "interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False}
    )
    assert moe["moe_layer_freq"] == str([0, 1] * 24) and not model["qk_l2_norm"] and model["ffn_hidden_size"] == 16384


def test_without_chunks_and_temperature():
    model, _ = from_hf_config({**SCOUT, "layer_types": ["full_attention"] * 48, "attn_temperature_tuning": False})
    assert not {"attention_chunk_size", "attention_temperature_scale"} & model.keys()


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "chunks elsewhere": ({"layer_types": ["chunked_attention"] * 48}, "layer_types does not have chunks in the layers with rotary"),
    "no chunk": ({"attention_chunk_size": 0}, "attention_chunk_size 0 is not a number of tokens"),
    "positions": ({"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0] is not one 0 or 1 for each of the 48 layers"),
    "floor": ({"floor_scale": 0}, "floor_scale 0 and attn_scale 0.1 are no temperature"),
    "layers": ({"moe_layers": [48]}, "moe_layers [48] and interleave_moe_layer_step 1 name no layers of 48"),
    "step": ({"interleave_moe_layer_step": 0}, "moe_layers None and interleave_moe_layer_step 0 name no layers"),
    "two experts": ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not 1, the only value"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_the_decoder_cannot_express_is_refused(case: str):
    change, message = UNREADABLE[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**SCOUT, **change})
    assert message in str(caught.value)


FLAGS = (
    "--vocab-size 256 --num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid --moe-apply-probs-on-input "
    "--rotary-interleaved --moe-ffn-hidden-size 64"
)


def test_a_model_of_ours_is_one_if_its_shared_expert_is_as_wide():
    run = load_config(
        f"{FLAGS} --moe-shared-expert-intermediate-size 64".split(), preset="tiny-llama", require_training=False
    )
    assert to_hf_config(model_spec(run.config))["model_type"] == "llama4_text"
    run = load_config(
        f"{FLAGS} --moe-shared-expert-intermediate-size 32".split(), preset="tiny-llama", require_training=False
    )
    with pytest.raises(
        ConfigError, match="moe-shared-expert-intermediate-size 32 cannot be written as a Hugging Face llama4_text"
    ):
        to_hf_config(model_spec(run.config))
