"""DeepSeek-V3.2 and GLM-5: the published settings, and models whose layers share an indexer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from petatron.base.errors import ConfigError
from petatron.estimate.flops import parameter_count
from petatron.models.hf import from_hf_config
from petatron.models.registry import model_spec
from petatron.validate import resolve_config

# The settings of deepseek-ai/DeepSeek-V3.2-Exp that say what the model is.
V32: dict[str, Any] = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "vocab_size": 129280, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "rope_theta": 10000, "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}  # fmt: skip
GLM = {
    **{key: value for key, value in V32.items() if key not in ("rope_scaling", "rope_theta")},
    "model_type": "glm_moe_dsa",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "indexer_rope_interleave": True,
    "index_topk_freq": 1,
}


def test_deepseek_v3_2_as_published_is_the_preset():
    run = resolve_config(preset="deepseek-v3.2", require_training=False)[0].config
    model, experts = from_hf_config(V32)
    training = {"init_method_std", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"}
    wanted = asdict(run.model) | asdict(run.moe) | {"moe_layer_freq": str([0] * 3 + [1] * 58)}
    assert {name: wanted[name] for name in model.keys() - training} == {
        name: model[name] for name in model.keys() - training
    }
    assert {name: wanted[name] for name in experts} == experts and model["experimental_attention_variant"] == "dsa"
    plain = resolve_config(preset="deepseek-v3", require_training=False)[0].config
    more = parameter_count(model_spec(run)) - parameter_count(model_spec(plain))
    assert more == 62 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128)  # the depth of prediction has one too


def test_glm_5_has_rotary_pairs_of_neighbors_and_norms_of_its_own():
    model, _ = from_hf_config(GLM)
    assert model["dsa_indexer_rope_interleaved"] and model["norm_epsilon"] == 1e-5
    assert model["latent_norm_epsilon"] == model["dsa_indexer_k_norm_epsilon"] == 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_types", ["full", "shared"] * 30 + ["full"]),
        ("index_topk_pattern", "FS" * 30 + "F"),
        ("index_topk_freq", 4),
    ],
)
def test_layers_that_share_an_indexer_are_refused(key: str, value: Any):
    with pytest.raises(ConfigError, match=f"{key}.*every layer of the decoder has an indexer"):
        from_hf_config({**GLM, key: value})
    if key != "indexer_types":  # which counts first
        from_hf_config({**GLM, key: value, "indexer_types": ["full"] * 61})
