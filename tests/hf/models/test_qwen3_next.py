"""Qwen3-Next whole: in float64 to nine digits against transformers, its config.json, and what published folders have besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from petatron.base.errors import ConfigError
from petatron.config.schema.attention_layer_freq import linear_layers
from petatron.estimate.flops import parameter_count
from petatron.layers.rope import inverse_frequencies
from petatron.models.decoder_spec import decoder_spec
from petatron.models.hf import parse_config_json, to_hf, to_hf_config, to_logical
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.hf.models.float64_model import LENGTH, check_float64, random_float64_model
from tests.hf.ours import run_config
from tests.hf.variant_zoo import SHAPE
from tests.hf.zoo import truth

FOUR_LAYERS = {
    **SHAPE, "num_hidden_layers": 4, "max_position_embeddings": 128, "head_dim": 16, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
}  # fmt: skip


def test_it_is_transformers_model_in_float64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = transformers.Qwen3NextConfig(**FOUR_LAYERS)
    theirs = random_float64_model(lambda: transformers.Qwen3NextForCausalLM(config), modeling, monkeypatch)
    run = run_config(theirs.config.to_dict(), tmp_path, layout="--fp64 --linear-chunk-size 16", length=LENGTH)
    [rope] = decoder_spec(run.model, run.moe).ropes
    # float32 on both sides, rounded in another way
    theirs.model.rotary_emb.inv_freq = inverse_frequencies(rope).double()
    check_float64(theirs, run, lambda tensors: logical(tensors, run))


def logical(tensors: dict[str, Tensor], run: Any) -> dict[str, Tensor]:
    return to_logical("qwen3_next", tensors, model_spec(run))


def test_rows_of_a_key_head_are_adjacent(tmp_path: Path):
    true = truth("qwen3-next-moe")
    run = run_config(true.config, tmp_path)
    ours = logical(true.weights, run)
    fused = true.weights["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    # Two key heads of width 6, each for two value heads of width 5: q, k, v and z of the first, then of the second.
    torch.testing.assert_close(ours["layers.0.delta.in_k.weight"][6:], fused[32 + 6 : 32 + 12], rtol=0, atol=0)
    torch.testing.assert_close(ours["layers.0.delta.in_z.weight"][:10], fused[22:32], rtol=0, atol=0)
    q_proj = true.weights["model.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(ours["layers.1.attention.gate.weight"][:16], q_proj[16:32], rtol=0, atol=0)
    back = to_hf("qwen3_next", ours, model_spec(run))
    assert back.keys() == true.weights.keys()
    for name, tensor in true.weights.items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def test_tensors_of_multi_token_prediction_are_left_out(tmp_path: Path):
    true = truth("qwen3-next-moe")
    weights = {**true.weights, "mtp.fc.weight": torch.ones(1), "mtp.layers.0.input_layernorm.weight": torch.ones(1)}
    run = run_config(true.config, tmp_path)
    assert logical(weights, run).keys() == logical(true.weights, run).keys()


def test_layers_are_named_or_counted():
    config = truth("qwen3-next-moe").config
    values, _ = parse_config_json({**config, "layer_types": None, "full_attention_interval": 2, "num_hidden_layers": 4})
    assert values["linear_attention_freq"] == "2" and values["experimental_attention_variant"] == "gated_delta_net"
    values, _ = parse_config_json({key: value for key, value in config.items() if key != "layer_types"})
    assert values["linear_attention_freq"] == "4" and values["rotary_percent"] == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types does not name each of the 2 layers"),
        ({"layer_types": ["mamba", "full_attention"]}, "full_attention or linear_attention"),
        (
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval 0 is not a positive whole number",
        ),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads 0 is not a positive whole number"),
        ({"linear_num_key_heads": 10**9}, "linear_num_key_heads 1000000000 is more than any model has"),
        ({"attention_bias": True}, "attention_bias True is not False"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_config_json({**truth("qwen3-next-moe").config, **changes})
    assert message in str(caught.value)


def test_a_model_without_gates_is_no_qwen3_next(tmp_path: Path):
    run = run_config(truth("qwen3-next-moe").config, tmp_path, layout="--no-attention-output-gate")
    with pytest.raises(
        ConfigError, match="--attention-output-gate False cannot be written as a Hugging Face qwen3_next"
    ):
        to_hf_config(model_spec(run))


def test_the_preset_is_the_published_model():
    run = load_config([], preset="qwen3-next-80b-a3b", require_training=False).config
    with torch.device("meta"):
        theirs = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**published()))
    assert parameter_count(model_spec(run)) == sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(linear_layers(run.model)) == 36
    ours = to_hf_config(model_spec(run))
    theirs_json = theirs.config.to_dict()
    assert {key: ours[key] for key in published()} == {key: theirs_json[key] for key in published()}
    assert ours["layer_types"] == theirs_json["layer_types"]


def published() -> dict[str, Any]:
    """The sizes in the config.json of Qwen3-Next-80B-A3B-Instruct."""
    return {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "tie_word_embeddings": False,
    }  # fmt: skip


def test_a_delta_net_without_experts_is_compared_with_its_own_kind():
    flags = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --vocab-size 64 --num-layers 4"
    run = load_config(flags.split(), preset="tiny-llama", require_training=False).config
    with pytest.raises(ConfigError) as caught:
        to_hf_config(model_spec(run))
    assert "Hugging Face qwen3_next model, which has always some" in str(caught.value)
