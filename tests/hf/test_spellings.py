"""Keys of config.json of which several mean one thing: ours are the ones that transformers goes by, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import petatron
from petatron.base.errors import CheckpointError, ConfigError
from petatron.models.hf import build_config_json, family_name_of_config, from_hf_config, keys_of_flags
from petatron.models.hf.check_claimed_counts import check_counts
from petatron.models.registry import model_spec
from petatron.pretrained.model_reader import open_model_reader
from tests.hf.ours import run_config

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
}
LLAMA = {**SHAPE, "model_type": "llama"}
MISTRAL = {**SHAPE, "model_type": "mistral", "sliding_window": 5}
NEOX = {**SHAPE, "model_type": "gpt_neox"}
GEMMA3 = {**SHAPE, "model_type": "gemma3_text"}
OLMO3 = {**SHAPE, "model_type": "olmo3"}
PHI3 = {**SHAPE, "model_type": "phi3"}
GPT_OSS = {**SHAPE, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
BAMBA = {**SHAPE, "model_type": "bamba", "mamba_d_head": 16}
GRANITE_4 = {**SHAPE, "model_type": "granitemoehybrid", "mamba_d_head": 16, "num_local_experts": 0}
NEMOTRON_H = {**SHAPE, "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E"}
LLAMA4 = {**SHAPE, "model_type": "llama4_text"}
QWEN2_MOE = {
    **SHAPE,
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
DEEPSEEK_V3 = {key: value for key, value in SHAPE.items() if key != "head_dim"}
DEEPSEEK_V3 |= {"model_type": "deepseek_v3", "first_k_dense_replace": 0}
KIMI = {
    **SHAPE,
    "model_type": "kimi_linear",
    "num_experts": 4,
    "num_experts_per_token": 2,
    "mlp_layer_types": ["dense", "dense"],
}
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}


def test_rope_scaling_that_was_added_to_a_newer_file_counts():
    """As model cards tell their readers to, for longer contexts; transformers goes by it whatever `rope_parameters` says."""
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    values, _ = from_hf_config({**LLAMA, "rope_parameters": DEFAULT_ROPE, "rope_scaling": added, "rope_theta": 300.0})
    assert values["position_embedding_type"] == "yarn" and values["rope_scaling_factor"] == 4.0
    assert values["rotary_base"] == 300.0, "the other table is not read at all"
    values, _ = from_hf_config({**GEMMA3, "rope_parameters": {FULL: DEFAULT_ROPE}, "rope_scaling": added})
    assert values["position_embedding_type"] == "yarn" and values["rotary_base"] == 500.0, "here it adds to the table"


def test_the_original_context_of_the_model_counts_more_than_that_of_its_scaling():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = {**LLAMA, "rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert from_hf_config(config)[0]["original_max_position_embeddings"] == 32
    assert from_hf_config({**LLAMA, "rope_scaling": scaling})[0]["original_max_position_embeddings"] == 16


def test_a_mistral_that_names_its_kinds_of_layers_is_a_ministral():
    """As transformers reads it: Ministral was published as a mistral."""
    config = {**MISTRAL, "layer_types": [SLIDING, FULL]}
    assert family_name_of_config(config) == "ministral"
    values, _ = from_hf_config(config)
    assert (values["window_size"], values["window_attn_skip_freq"]) == (5, "[1, 0]")
    assert family_name_of_config({**MISTRAL, "layer_types": None}) == "mistral"


def test_gpt_neox_is_read_and_written_with_its_own_keys_of_rope(tmp_path: Path):
    """transformers reads no others next to `rope_scaling`."""
    linear = {"rope_type": "linear", "factor": 2.0}
    config = {**NEOX, "rotary_emb_base": 500, "rotary_pct": 0.5, "rope_scaling": linear}
    values, _ = from_hf_config(config)
    assert (values["rotary_base"], values["rotary_percent"]) == (500.0, 0.5)
    written = build_config_json(model_spec(run_config(config, tmp_path)), "float32")
    assert written["model_type"] == "gpt_neox"
    assert (written["rotary_emb_base"], written["rotary_pct"]) == (500.0, 0.5)


def test_gpt_oss_scales_its_rope_unless_a_table_says_another_way():
    for empty in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        assert from_hf_config({**GPT_OSS, **empty})[0]["rope_scaling_factor"] == 32.0
    for key in ("rope_parameters", "rope_scaling"):
        assert from_hf_config({**GPT_OSS, key: DEFAULT_ROPE})[0]["position_embedding_type"] == "rope"


def test_phi3_has_longrope_alone():
    """Under three names, and a scaling of another kind is no phi3 when it is written: transformers opens none."""
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("longrope", "su", "yarn"):
        values, _ = from_hf_config({**PHI3, "max_position_embeddings": 8192, "rope_scaling": {"type": name, **lists}})
        assert values["longrope_long_factor"] and values["original_max_position_embeddings"] == 4096
        assert values["rope_scaling_factor"] == 2.0
    shorter, _ = from_hf_config({**PHI3, "max_position_embeddings": 64, "rope_scaling": {"type": "su", **lists}})
    assert shorter["rope_scaling_factor"] == 1.0, "a context below the original one is not stretched"


@pytest.mark.parametrize(
    "flag", ["--position-embedding-type yarn", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor 2"]
)
def test_a_scaling_that_transformers_lacks_for_a_family_is_written_as_another(flag: str, tmp_path: Path):
    run = run_config({**PHI3, "partial_rotary_factor": 0.5}, tmp_path)
    assert build_config_json(model_spec(run), "float32")["model_type"] == "phi3"
    scaled = run_config({**PHI3, "partial_rotary_factor": 0.5}, tmp_path, layout=flag)
    assert build_config_json(model_spec(scaled), "float32")["model_type"] not in ("phi3", "glm")


def test_gelu_is_its_approximation_in_the_first_gemma_alone():
    assert from_hf_config({**GEMMA3, "model_type": "gemma", "hidden_act": "gelu"})[0]["activation"] == "geglu_tanh"
    assert from_hf_config({**GEMMA3, "hidden_activation": "gelu"})[0]["activation"] == "geglu"


def test_a_switch_that_is_off_may_be_null():
    for value in (None, False):
        from_hf_config({**GEMMA3, "model_type": "gemma", "use_bidirectional_attention": value, "attention_bias": value})
    with pytest.raises(ConfigError, match=r"clip_qkv 0\.0 is not None"):
        from_hf_config({**SHAPE, "model_type": "olmoe", "num_experts": 2, "num_experts_per_tok": 1, "clip_qkv": 0.0})


def test_a_model_without_windows_is_written_with_one_where_transformers_needs_it(tmp_path: Path):
    run = run_config({**GEMMA3, "layer_types": [FULL, FULL], "sliding_window": 7}, tmp_path)
    assert run.model.window_size is None
    written = build_config_json(model_spec(run), "float32")
    assert written["model_type"] == "gemma3_text" and written["sliding_window"] == 4096
    assert from_hf_config(written)[0]["window_size"] is None


def test_longrope_of_latent_attention_has_a_factor_for_each_of_its_rotary_pairs(tmp_path: Path):
    """And not for those of channels without positions."""
    table = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    config = {**DEEPSEEK_V3, "qk_rope_head_dim": 4, "num_nextn_predict_layers": 0, "rope_parameters": table}
    assert run_config(config, tmp_path).model.longrope_long_factor == "[2.0, 3.0]"
    with pytest.raises(ConfigError, match="has 2 numbers, and a head has 4 rotary pairs"):
        run_config({**config, "qk_rope_head_dim": 8}, tmp_path)


def test_granite_4_without_kinds_of_layers_has_no_attention():
    assert from_hf_config(GRANITE_4)[0]["hybrid_layer_pattern"] == "M-M-"


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 2.0}])
def test_granite_4_without_positions_scales_none(scaling: dict[str, Any], tmp_path: Path):
    config = {**GRANITE_4, "layer_types": [FULL, "linear_attention"], "rope_scaling": scaling}
    assert run_config(config, tmp_path).model.position_embedding_type == "none"


NESTED = {FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no theta": ({**LLAMA, "rope_theta": None}, "rope_theta None is not a number"),
    "no local theta": (
        {**GEMMA3, "rope_parameters": {SLIDING: {"rope_theta": None}}},
        "rope_parameters.sliding_attention.rope_theta None is not a number",
    ),
    "a number for a kind of layers": (
        {**OLMO3, "rope_parameters": {FULL: 500.0}},
        "rope_parameters is not a table of full_attention",
    ),
    "one table for kinds of layers": ({**OLMO3, "rope_parameters": DEFAULT_ROPE}, "is not a table of full_attention"),
    "theta of which layers": (
        {**OLMO3, "rope_theta": 300.0},
        "rope_theta 300.0 is that of all layers in transformers 4",
    ),
    "truncate within a kind": ({**OLMO3, "rope_parameters": NESTED}, "full_attention.truncate False is not read by"),
    "linear phi3": ({**PHI3, "rope_scaling": {"type": "linear", "factor": 2}}, "a phi3 model does not have here"),
    "theta of gpt-neox": ({**NEOX, "rope_theta": 500.0}, "rope_theta 500.0 is not read by transformers, which has rot"),
    "part of gpt-neox": ({**NEOX, "partial_rotary_factor": 0.5}, "which has rotary_pct here. Write rotary_pct too."),
    "caps in gemma 3": ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not None"),
    "no experts": (KIMI, "mlp_layer_types dense in every layer leaves no layer of 2 for the experts"),
    "an older name of scaling": (
        {**GEMMA3, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling.type 'linear' counts in transformers 4, and not in 5",
    ),
    "no part": (
        {**SHAPE, "model_type": "glm", "partial_rotary_factor": None},
        "partial_rotary_factor None is not a number",
    ),
    "another part in bamba": (
        {**BAMBA, "partial_rotary_factor": 1.0},
        "partial_rotary_factor 1.0 is not 0.5, the only",
    ),
    "another part of bamba's table": (
        {**BAMBA, "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.25}},
        "partial_rotary_factor 0.25 is not 0.5, the only",
    ),
    "heads of another width": ({**OLMO3, "head_dim": 20}, "head_dim 20 is not hidden_size / num_attention_heads, and"),
    "no length": ({**LLAMA, "max_position_embeddings": None}, "max_position_embeddings None is not a whole number"),
    "no epsilon": ({**LLAMA, "rms_norm_eps": None}, "rms_norm_eps None is not a number"),
    "no scale": ({**GEMMA3, "query_pre_attn_scalar": None}, "query_pre_attn_scalar None is not a whole number"),
    "no factor of scores": (
        {**SHAPE, "model_type": "granite", "attention_multiplier": None},
        "attention_multiplier None is not a number",
    ),
    "no clamp of gates": ({**GPT_OSS, "swiglu_limit": None}, "swiglu_limit None is not a number"),
    "a latent that is no width": (
        {**NEMOTRON_H, "moe_latent_size": "16"},
        "moe_latent_size '16' is not a whole number",
    ),
    "an activation that is none": ({**LLAMA, "hidden_act": ["silu"]}, "hidden_act \"['silu']\" is not an activation"),
    "layers that are none": (
        {**QWEN2_MOE, "mlp_only_layers": [None]},
        "mlp_only_layers [None] is not a list of layers",
    ),
    "kinds that are none": ({**NEMOTRON_H, "layers_block_type": [None]}, "layers_block_type None is a kind of layer"),
    "a kind for all layers": (
        {**LLAMA4, "layer_types": FULL},
        "layer_types does not have chunks in the layers with rotary",
    ),
    "older names of a switch": ({**NEMOTRON_H, "mamba_conv_bias": False}, "use_conv_bias False is not True"),
    "older names of bounds": ({**NEMOTRON_H, "mamba_dt_limit": [0.0, 0.1]}, "time_step_limit [0.0, 0.1] bounds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_reads_otherwise_is_refused(case: str):
    config, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    assert message in str(caught.value)


TOGETHER: dict[str, tuple[dict[str, Any], set[str]]] = {
    "rope": (
        {**LLAMA, "rope_theta": None, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "dynamic"}},
        {"rope_theta", "partial_rotary_factor", "rope_scaling.rope_type"},
    ),
    "experts": (
        {**DEEPSEEK_V3, "n_group": 7, "first_k_dense_replace": 9, "num_experts_per_tok": 300, "hidden_act": "mish"},
        {"n_group", "first_k_dense_replace", "num_experts_per_tok", "hidden_act"},
    ),
    "bamba": (
        {**BAMBA, "attn_layer_indices": [9], "mamba_d_conv": 3},
        {"attn_layer_indices", "mamba_d_conv"},
    ),
    "nemotron-h": (
        {**NEMOTRON_H, "hybrid_override_pattern": "X", "use_bias": True},
        {"hybrid_override_pattern", "use_bias"},
    ),
    "granite 4": ({**GRANITE_4, "layer_types": ["x"], "mamba_d_conv": 3}, {"layer_types", "mamba_d_conv"}),
    "a count": (
        {**GRANITE_4, "layer_types": ["mamba", "mamba"], "num_hidden_layers": "2"},
        {"num_hidden_layers"},
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_problems_of_one_file_are_told_together(case: str):
    config, told = TOGETHER[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    assert {problem.where for problem in caught.value.problems} == told


def test_a_problem_of_a_folder_is_told_in_its_own_keys(tmp_path: Path):
    config = {**SHAPE, "model_type": "glm", "head_dim": 6, "partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"tensor{number}": torch.zeros(1) for number in range(4)}, tmp_path / "model.safetensors")
    for opened in (petatron.from_pretrained, open_model_reader):
        with pytest.raises(ConfigError) as caught:
            opened(tmp_path)
        assert "config.json: partial_rotary_factor 0.5 rotates 3 of head_dim 6, which is not" in str(caught.value)
    for key in ("rope_parameters", "rope_scaling"):
        assert keys_of_flags({**config, key: {"factor": 2.0}})["--rope-scaling-factor"] == f"{key}.factor"
    assert keys_of_flags({"model_type": "unknown"}) == {}


def test_a_key_of_two_settings_is_told_once():
    """The width of experts, and that of an MLP which no layer has."""
    config = {key: value for key, value in GPT_OSS.items() if key != "intermediate_size"}
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    assert [problem.where for problem in caught.value.problems] == ["intermediate_size"]
    assert keys_of_flags(config)["--activation"] == "hidden_act"


def test_biases_that_are_refused_are_told_once():
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**BAMBA, "attention_bias": True})
    assert [problem.where for problem in caught.value.problems] == ["attention_bias"]


def test_experts_of_a_hybrid_are_counted_in_its_layers_with_experts():
    """As in Nemotron 3 Nano: 128 experts in 23 of 52 layers, in fewer tensors than 52 layers of them would have."""

    def count(pattern: str, num_tensors: int) -> None:
        model, refuse = {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}, CheckpointError
        check_counts(
            Path("config.json"),
            lambda path, why: refuse(f"{path} {why}"),
            model,
            {"num_experts": 128, "moe_layer_freq": "1"},
            num_tensors=num_tensors,
            separate_experts=True,
        )

    nano = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    count(nano, 6243)
    with pytest.raises(CheckpointError, match="says 128 experts, and 2,000 tensors"):
        count(nano, 2000)
