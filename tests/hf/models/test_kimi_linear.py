"""Kimi-Linear: config.json in both spellings, names of both kinds of folders, what is refused, and the published size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from petatron.base.errors import ConfigError
from petatron.config.schema.attention_layer_freq import linear_layers
from petatron.estimate.flops import parameter_count
from petatron.models.hf import matching_family, parse_config_json, to_hf_config, to_logical
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.hf.models.float64_model import LENGTH, check_float64, random_float64_model
from tests.hf.ours import run_config
from tests.hf.zoo import truth

KIMI = "kimi-linear-moe"


def logical(tensors: dict[str, Tensor], run: Any) -> dict[str, Tensor]:
    return to_logical("kimi_linear", tensors, model_spec(run))


def four_layers() -> Any:
    """Both kinds of mixers with both kinds of MLPs."""
    config = transformers.KimiLinearConfig(**truth(KIMI).config)
    config.num_hidden_layers, config.layer_types = (
        4,
        ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )
    config.mlp_layer_types = ["dense", "sparse", "sparse", "dense"]
    return transformers.KimiLinearForCausalLM(config)


def test_it_is_transformers_model_in_float64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    theirs = random_float64_model(four_layers, modeling, monkeypatch)
    config = {**theirs.config.to_dict(), "model_max_length": 128}
    run = run_config(config, tmp_path, layout="--fp64 --linear-chunk-size 16 --moe-router-dtype fp64", length=LENGTH)
    check_float64(theirs, run, lambda tensors: logical(tensors, run))


def test_dense_layers_are_read_under_both_names(tmp_path: Path):
    true = truth(KIMI)
    run = run_config(true.config, tmp_path)
    theirs = {name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): x for name, x in true.weights.items()}
    assert theirs.keys() != true.weights.keys()
    expected = logical(true.weights, run)
    for name, tensor in logical(theirs, run).items():
        assert torch.equal(tensor, expected[name])


def published(**changes: Any) -> dict[str, Any]:
    """The keys in the config.json of Kimi-Linear-48B-A3B that say what the model is."""
    full = [4, 8, 12, 16, 20, 24, 27]
    table = {
        "full_attn_layers": full, "kda_layers": [layer for layer in range(1, 28) if layer not in full],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    }  # fmt: skip
    return {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "model_max_length": 1048576, "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "linear_attn_config": table, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.446, "tie_word_embeddings": False,
        "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0, **changes,
    }  # fmt: skip


def test_the_preset_is_the_published_model():
    run = load_config([], preset="kimi-linear-48b-a3b", require_training=False).config
    keys = {key: value for key, value in published().items() if key != "head_dim"}
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**keys))
    assert parameter_count(model_spec(run)) == sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(linear_layers(run.model)) == 20
    ours = to_hf_config(model_spec(run))
    assert {key: ours[key] for key in keys if key in ours} == {key: keys[key] for key in keys if key in ours}
    assert {"linear_attn_config", "first_k_dense_replace", "num_shared_experts"} <= ours.keys()
    assert ours["layer_types"] == theirs.config.layer_types and ours["mlp_layer_types"] == theirs.config.mlp_layer_types


def test_both_spellings_are_the_same_model():
    theirs = transformers.KimiLinearConfig(**{key: value for key, value in published().items() if key != "head_dim"})
    assert parse_config_json(published()) == parse_config_json(theirs.to_dict())
    values, experts = parse_config_json({"model_type": "kimi_linear", **{key: published()[key] for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}})  # fmt: skip
    # transformers' own defaults: every fourth layer, counted from 0, is attention, but not the first.
    defaults = transformers.KimiLinearConfig()
    assert values["linear_attention_freq"] == str([int(kind == "linear_attention") for kind in defaults.layer_types])
    assert experts["moe_layer_freq"] == str([0] + [1] * 26) and experts["num_experts"] == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types does not name each of the 27 layers"),
        ({"linear_attn_config": 3}, "linear_attn_config 3 is not a table of settings"),
        ({"linear_attn_config": {"head_dim": 0}}, "linear_attn_config.head_dim 0 is not a positive whole number"),
        ({"linear_attn_config": {"num_heads": 10**9}}, "linear_attn_config.num_heads 1000000000 is not a positive"),
        (
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}},
            "linear_attn_config.full_attn_layers [4] and kda_layers do not have each of the 27 layers",
        ),
        (
            {"linear_attn_config": {"full_attn_layers": 4, "kda_layers": [1, 2]}},
            "linear_attn_config.full_attn_layers 4 and kda_layers do not have each",
        ),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types does not name each of the 27 layers dense or sparse"),
        ({"mla_use_nope": False}, "mla_use_nope False is not True"),
        ({"num_shared_experts": 0}, "num_shared_experts 0 is not a positive whole number"),
        ({"num_expert_group": 3}, "num_expert_group 3 does not divide the 256 experts"),
        ({"num_experts_per_token": 1}, "num_experts_per_token 1 with a normalized weight"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_config_json(published(**changes))
    assert message in str(caught.value)


def test_sizes_and_layers_that_are_wrong_are_said_at_once():
    table = {"head_dim": 0, "num_heads": "x", "full_attn_layers": [1], "kda_layers": [1]}
    with pytest.raises(ConfigError) as caught:
        parse_config_json(published(linear_attn_config=table))
    told = [problem.where.removeprefix("linear_attn_config.") for problem in caught.value.problems]
    assert told == ["head_dim", "num_heads", "full_attn_layers"]


def test_a_model_without_experts_is_told_what_experts_it_needs():
    """All at once: experts with default settings would be refused in turn."""
    flags = "--num-experts none --moe-layer-freq 1 --moe-shared-expert-intermediate-size none --num-layers 27"
    run = load_config(flags.split(), preset="kimi-linear-48b-a3b", require_training=False).config
    with pytest.raises(ConfigError) as caught:
        to_hf_config(model_spec(run))
    told = {problem.where for problem in caught.value.problems}
    assert {"--num-experts", "--moe-router-score-function", "--moe-router-enable-expert-bias"} <= told
    assert {"--moe-router-dtype", "--moe-shared-expert-intermediate-size"} <= told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--linear-num-key-heads 2", "--linear-num-key-heads 2 cannot be written as a Hugging Face kimi_linear model"),
        ("--linear-key-head-dim 5", "--linear-key-head-dim 5 cannot be written as a Hugging Face kimi_linear model"),
        ("--position-embedding-type rope --qk-pos-emb-head-dim 4", "--position-embedding-type rope cannot be written"),
        ("--latent-norm-epsilon 1e-5", "--latent-norm-epsilon 1e-05 cannot be written"),
    ],
)
def test_what_the_family_has_not_is_said(flags: str, message: str, tmp_path: Path):
    spec = model_spec(run_config(truth(KIMI).config, tmp_path, layout=flags))
    assert matching_family(spec) is None
    with pytest.raises(ConfigError) as caught:
        to_hf_config(spec)
    assert message in str(caught.value)
