"""MiniMax-Text-01 whole: in float64 to nine digits against transformers, its config.json in both spellings, and the published size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.minimax import modeling_minimax as modeling

from petatron.base.errors import ConfigError
from petatron.config.schema.attention_layer_freq import linear_layers
from petatron.estimate.flops import parameter_count
from petatron.layers.rope import inverse_frequencies
from petatron.layers.ssm.lightning_attention import LightningSpec
from petatron.models.decoder_spec import decoder_spec
from petatron.models.hf import matching_family, parse_config_json, to_hf, to_hf_config, to_logical
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.hf.models.float64_model import LENGTH, check_float64, random_float64_model
from tests.hf.ours import run_config
from tests.hf.zoo import truth

MINIMAX = "minimax-moe"
ALPHA = 3.5565588200778455


def logical(tensors: dict[str, Tensor], run: Any) -> dict[str, Tensor]:
    return to_logical("minimax", tensors, model_spec(run))


def test_it_is_transformers_model_in_float64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = transformers.MiniMaxConfig(**{**truth(MINIMAX).config, "max_position_embeddings": 128, "block_size": 16})
    config.num_hidden_layers, config.layer_types = 4, ["linear_attention", "full_attention", *["linear_attention"] * 2]
    theirs = random_float64_model(lambda: transformers.MiniMaxForCausalLM(config), modeling, monkeypatch)
    run = run_config(
        theirs.config.to_dict(),
        tmp_path,
        layout="--fp64 --linear-chunk-size 12 --moe-router-dtype fp64 --moe-aux-loss-coeff 0",
        length=LENGTH,
    )
    spec = decoder_spec(run.model, run.moe)
    # float32 on both sides, rounded in another way
    theirs.model.rotary_emb.inv_freq = inverse_frequencies(spec.ropes[0]).double()
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, LightningSpec):
            mixer = theirs.model.layers[index].self_attn
            mixer.slope_rate = torch.tensor(layer.mixer.slopes(index), dtype=torch.float64)[:, None, None]
            mixer.query_decay, mixer.key_decay, mixer.diagonal_decay = mixer.decay_factors(mixer.slope_rate)
    check_float64(theirs, run, lambda tensors: logical(tensors, run))


def test_rows_of_a_head_are_adjacent(tmp_path: Path):
    true = truth(MINIMAX)
    run = run_config(true.config, tmp_path)
    ours = logical(true.weights, run)
    fused = true.weights["model.layers.0.self_attn.qkv_proj.weight"]
    # Four heads of width 16: query, key and value of the first, then of the second.
    torch.testing.assert_close(ours["layers.0.lightning.in_k.weight"][16:32], fused[48 + 16 : 48 + 32], rtol=0, atol=0)
    back = to_hf("minimax", ours, model_spec(run))
    assert back.keys() == true.weights.keys()


def sizes() -> dict[str, Any]:
    """The sizes in the config.json of MiniMax-Text-01, in either spelling."""
    return {
        "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 10240000, "rms_norm_eps": 1e-5, "num_local_experts": 32,
        "num_experts_per_tok": 2, "hidden_act": "silu", "tie_word_embeddings": False, "rotary_dim": 64,
    }  # fmt: skip


def published(**changes: Any) -> dict[str, Any]:
    """The keys in the config.json that is beside the model's own code."""
    factors = {f"layernorm_{branch}_alpha": ALPHA for branch in ("full_attention", "linear_attention", "mlp")}
    factors |= {f"layernorm_{branch}_beta": 1.0 for branch in ("full_attention", "linear_attention", "mlp")}
    return {
        **sizes(), **factors, "model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "postnorm": True,
        "rope_theta": 10000000, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
        "router_jitter_noise": 0.0, "attention_dropout": 0.0, **changes,
    }  # fmt: skip


def of_transformers() -> transformers.MiniMaxConfig:
    factors = {f"{branch}_alpha_factor": ALPHA for branch in ("full_attn", "linear_attn", "mlp")}
    kinds = (["linear_attention"] * 7 + ["full_attention"]) * 10
    rope = {"rope_type": "default", "rope_theta": 10000000}
    return transformers.MiniMaxConfig(**sizes(), **factors, layer_types=kinds, rope_parameters=rope)


def test_the_preset_is_the_published_model():
    run = load_config([], preset="minimax-text-01", require_training=False).config
    with torch.device("meta"):
        theirs = transformers.MiniMaxForCausalLM(of_transformers())
    count = parameter_count(model_spec(run))
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    tables = 2 * 200064 * 6144  # which the 45.9 billion active ones are without
    assert round(count / 1e9) == 456
    assert round((parameter_count(model_spec(run), active=True) - tables) / 1e9, 1) == 45.9
    assert sum(linear_layers(run.model)) == 70
    ours, wanted = to_hf_config(model_spec(run)), of_transformers().to_dict()
    keys = [*sizes(), "layer_types", *(key for key in wanted if key.endswith("_factor"))]
    assert {key: ours[key] for key in keys} == {key: wanted[key] for key in keys}
    assert ours["rope_parameters"]["rope_theta"] == 10000000


def test_both_spellings_are_the_same_model():
    assert parse_config_json(published()) == parse_config_json(of_transformers().to_dict())
    values, _ = parse_config_json(published())
    assert values["rotary_percent"] == 0.5 and values["mlp_stream_multiplier"] == ALPHA


def test_layers_that_are_not_named_alternate():
    config = {key: value for key, value in truth(MINIMAX).config.items() if key != "layer_types"}
    values, _ = parse_config_json({**config, "num_hidden_layers": 3})
    assert values["linear_attention_freq"] == "[0, 1, 0]", "as transformers has them: attention first"
    assert transformers.MiniMaxConfig(num_hidden_layers=3).layer_types == [
        "full_attention",
        "linear_attention",
        "full_attention",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attn_type_list": [0, 1]},
            "layer_types does not name each of the 80 layers full_attention or linear_attention",
        ),
        ({"attn_type_list": [0, 2] * 40}, "layer_types does not name each of the 80 layers"),
        ({"attn_type_list": 8}, "layer_types does not name each of the 80 layers"),
        ({"layer_types": ["mamba"] * 80}, "layer_types does not name each of the 80 layers"),
        ({"rotary_dim": 63}, "rotary_dim 63 is not an even number of the 128 channels of a head"),
        ({"rotary_dim": 256}, "rotary_dim 256 is not an even number of the 128 channels of a head"),
        ({"rotary_dim": "x"}, "rotary_dim 'x' is not"),
        ({"sliding_window": 4096}, "sliding_window 4096 is a window in the layers of attention"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size 64 is a shared expert"),
        ({"postnorm": False}, "postnorm False is not True"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not 0.0"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not an activation the decoder has'),
        ({"layernorm_mlp_beta": "x"}, "x"),
        ({"mlp_alpha_factor": 2.0}, "layernorm_mlp_alpha 3.5565588200778455 is another spelling of mlp_alpha_factor"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_config_json(published(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--norm-placement pre", "--norm-placement pre cannot be written as a Hugging Face minimax model"),
        ("--mlp-multipliers 0.5 1", "--mlp-multipliers (0.5, 1.0) cannot be written as a Hugging Face minimax model"),
        ("--window-size 4", "--window-size 4 cannot be written as a Hugging Face minimax model"),
        ("--embedding-multiplier 2", "--embedding-multiplier 2.0 cannot be written"),
    ],
)
def test_what_the_family_has_not_is_said(flags: str, message: str, tmp_path: Path):
    spec = model_spec(run_config(truth(MINIMAX).config, tmp_path, layout=flags))
    assert matching_family(spec) is None
    with pytest.raises(ConfigError) as caught:
        to_hf_config(spec)
    assert message in str(caught.value)
