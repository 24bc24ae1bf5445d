"""Hybrids of Mamba-2 in config.json: kinds of layers in every spelling, what is refused, and which family a model of ours is saved as."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from petatron.base.errors import ConfigError
from petatron.bench.peers.bench_workload import bench_spec
from petatron.bench.peers.huggingface import build_model as build_peer
from petatron.estimate.flops import parameter_count
from petatron.mesh.mesh import ParallelMesh
from petatron.models.decoder import Decoder
from petatron.models.hf import (
    build_config_json,
    fill_model,
    from_hf_config,
    matching_family,
    to_hf,
    to_hf_config,
    to_logical,
)
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec, spec_from_config
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_model
from petatron.validate import load_config
from tests.hf.zoo import BUILDERS
from tests.longform import later

BASE = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 61 --mock-data --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type none --train-iters 1 --lr 1e-3 --mamba-head-dim 8 --mamba-state-dim 6 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --hybrid-layer-pattern"
)
SWIGLU_ROPE = "--swiglu --position-embedding-type rope --rotary-percent 0.5 --mamba-norm-groups 1"

FALCON = "--swiglu --position-embedding-type rope"
PUBLISHED_FALCON = {
    "model_type": "falcon_h1",
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 16384,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "vocab_size": 32784,
}


def spec_of(flags: str) -> ModelSpec:
    return model_spec(load_config(f"{BASE} {flags}".split()).config)


@cache
def config_of(name: str) -> dict[str, Any]:
    return BUILDERS[name]().config.to_dict()


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """A model's config.json with some keys changed, or left out if None is given."""
    content = {**config_of(name), **changes}
    return {key: value for key, value in content.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (changed("granite-hybrid", layer_types=["mamba", "attention"]), "M-*-"),
        (changed("granite-hybrid", layer_types=None, layers_block_type=["mamba", "mamba"]), "M-M-"),
        (changed("nemotron-h", layers_block_type=None, hybrid_override_pattern="M*-M"), "M*-M"),
        (changed("nemotron-h", num_hidden_layers=99), "M-*M"),
        (changed("bamba", attn_layer_indices=[0]), "*-M-"),
        (changed("bamba", attn_layer_indices=None), "M-M-"),
        (changed("mamba2", time_step_limit=[0.0, {"__float__": "Infinity"}]), "MM"),
        (changed("mamba2", time_step_limit=[0.0, float("inf")]), "MM"),
        (changed("mamba2", time_step_limit=None), "MM"),
        (changed("falcon-h1", num_hidden_layers=3), "P-P-P-"),
    ],
)
def test_layers_are_read_in_every_spelling(content: dict[str, Any], pattern: str):
    values, _ = from_hf_config(content)
    assert values["hybrid_layer_pattern"] == pattern and values["num_layers"] == len(pattern)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            changed("granite-hybrid", layer_types=["mamba", "rwkv"]),
            "layer_types 'rwkv' is a kind of layer that the decoder",
        ),
        (changed("granite-hybrid", layer_types=["mamba", 3]), "layer_types 3 is a kind of layer"),
        (changed("granite-hybrid", layer_types=["mamba", "moe"]), "layer_types 'moe' is a kind of layer"),
        (changed("granite-hybrid", layer_types="mamba"), "layer_types is no list of the kinds of layers"),
        (changed("granite-hybrid", num_hidden_layers=3), "layer_types 2 kinds are not those of 3 layers"),
        (changed("granite-hybrid", mamba_proj_bias=True), "mamba_proj_bias True is not False"),
        (changed("nemotron-h", layers_block_type=None), "layers_block_type is no list of the kinds"),
        (changed("nemotron-h", layers_block_type=["mamba", "rwkv"]), "layers_block_type 'rwkv' is a kind of layer"),
        (
            changed("nemotron-h", layers_block_type=None, hybrid_override_pattern="MG*"),
            "hybrid_override_pattern 'MG*' is no pattern of the symbols M*-E",
        ),
        (
            changed("nemotron-h", layers_block_type=None, hybrid_override_pattern="M|M"),
            "hybrid_override_pattern 'M|M' is no pattern of the symbols",
        ),
        (changed("nemotron-h-moe", n_shared_experts=0), "n_shared_experts 0 is not a positive whole number"),
        (changed("bamba", num_hidden_layers=0), "num_hidden_layers 0 is not a positive whole number of layers"),
        (changed("bamba", attn_layer_indices=[2]), "attn_layer_indices [2] are not some of the 2 layers"),
        (changed("bamba", mamba_n_heads=0), "mamba_n_heads 0 is not a positive whole number"),
        (changed("bamba", mamba_d_head="auto"), "mamba_d_head 'auto' is not a positive whole number"),
        (
            changed("mamba2", num_hidden_layers="two"),
            "num_hidden_layers 'two' is not a positive whole number of layers",
        ),
        (
            changed("mamba2", time_step_limit=[0.001, float("inf")]),
            "time_step_limit [0.001, inf] bounds the step sizes",
        ),
        (changed("mamba2", time_step_limit=[0.0, 0.5]), "time_step_limit [0.0, 0.5] bounds the step sizes"),
        (changed("mamba2", conv_kernel=3), "conv_kernel 3 is not 4"),
        (changed("falcon-h1", num_hidden_layers=0), "num_hidden_layers 0 is not a positive whole number of layers"),
        (
            changed("falcon-h1", ssm_multipliers=[1.0, 2.0]),
            "ssm_multipliers [1.0, 2.0] is no list of 5 positive numbers",
        ),
        (changed("falcon-h1", mlp_multipliers="2"), "mlp_multipliers '2' is no list of 2 positive numbers"),
        (changed("falcon-h1", lm_head_multiplier=0.0), "lm_head_multiplier 0.0 is not a positive number"),
        (changed("falcon-h1", key_multiplier=True), "key_multiplier True is not a number"),
        (changed("falcon-h1", mamba_d_ssm=64), "mamba_d_ssm 64 is not the width of 8 heads of 6 channels"),
        (
            {**changed("falcon-h1"), "mamba_d_ssm": None},
            "mamba_expand 2 times hidden_size 32 is not the width of 8 heads of 6 channels",
        ),
        (changed("falcon-h1", projectors_bias=True), "projectors_bias True is not False"),
        (changed("falcon-h1", time_step_limit=[0.0, 0.5]), "time_step_limit [0.0, 0.5] bounds the step sizes"),
    ],
)
def test_what_the_decoder_cannot_express_is_named(content: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        from_hf_config(content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"mamba_d_head": None, "mamba_d_ssm": 100, "key_multiplier": -1.0, "hidden_act": "gelu", "mlp_bias": True},
            ["mamba_d_head", "hidden_act", "mlp_bias", "key_multiplier"],
        ),
        ({"num_hidden_layers": 0, "mlp_multipliers": [1]}, ["num_hidden_layers", "mlp_multipliers"]),
        ({"rope_scaling": 3, "vocab_size": "x", "mamba_d_ssm": 64}, ["vocab_size", "rope_scaling", "mamba_d_ssm"]),
        ({"hidden_size": None, "mamba_d_ssm": None, "mamba_expand": 3}, ["hidden_size"]),
    ],
)
def test_all_that_is_wrong_is_said_at_once(changes: dict[str, Any], told: list[str]):
    """But what depends on a value that is wrong itself: here whether the width is that of all heads."""
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**changed("falcon-h1"), **changes})
    assert [problem.where for problem in caught.value.problems] == told


def test_what_is_wrong_besides_the_kinds_of_layers_is_told_with_them():
    content = changed("nemotron-h", layers_block_type=["x"], mlp_hidden_act="nosuch")
    with pytest.raises(ConfigError) as caught:
        from_hf_config(content)
    assert [problem.where for problem in caught.value.problems] == ["layers_block_type", "mlp_hidden_act"]


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ("MM --mamba-num-groups 2 --mamba-norm-groups 1", "mamba2"),
        ("MM --mamba-num-groups 1 --position-embedding-type rope", "mamba2"),
        ("MM --mamba-num-groups 1 --position-embedding-type learned_absolute", None),
        ("MM --mamba-num-groups 2", None),
        ("M--*M --mamba-num-groups 2 --squared-relu", "nemotron_h"),
        (f"M-*- --mamba-num-groups 2 {SWIGLU_ROPE}", "bamba"),
        ("M-*- --mamba-num-groups 1 --swiglu --softmax-scale 0.2", "granitemoehybrid"),
        ("M*-- --mamba-num-groups 1 --swiglu", None),
        ("M-*- --mamba-num-groups 1 --swiglu --window-size 5", None),
        ("*-*- --swiglu --softmax-scale 0.2", "granitemoehybrid"),
        (f"P-P- --mamba-num-groups 2 --key-multiplier 0.5 {FALCON}", "falcon_h1"),
        (f"P-P- --mamba-num-groups 2 --mamba-norm-groups 1 --mamba-gated-norm none {FALCON}", "falcon_h1"),
        (f"P-P- --mamba-num-groups 2 --mamba-norm-groups 1 {FALCON}", None),
        (f"P-M- --mamba-num-groups 2 {FALCON}", None),
        ("M-*- --mamba-num-groups 1 --swiglu --softmax-scale 0.2 --ssm-out-multiplier 2", None),
    ],
)
def test_a_model_is_saved_as_the_family_that_has_its_details(flags: str, family: str | None):
    found = matching_family(spec_of(flags))
    assert (None if found is None else found.name) == family


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("MM --mamba-num-groups 2 --mamba-norm-groups 1 --mamba-num-heads 6", "--mamba-num-heads 6 cannot be written"),
        ("M--*M --mamba-num-groups 2 --squared-relu --mamba-norm-groups 1", "--mamba-norm-groups 1 cannot be written"),
        (
            f"M*-- --mamba-num-groups 2 {SWIGLU_ROPE}",
            "--rotary-percent 0.5 cannot be written as a Hugging Face nemotron_h model",
        ),
        ("MM --mamba-num-groups 2", "--mamba-norm-groups 2 cannot be written as a Hugging Face mamba2 model"),
        ("M-M --mamba-num-groups 2", "--hybrid-layer-pattern M-M cannot be written"),
        (f"M-*- --mamba-num-groups 1 --mamba-num-heads 6 {SWIGLU_ROPE}", "--mamba-num-heads 6 cannot be written"),
    ],
)
def test_reasons_why_no_family_has_a_model(flags: str, message: str):
    with pytest.raises(ConfigError) as caught:
        to_hf_config(spec_of(flags))
    assert message in str(caught.value)


def test_the_preset_of_falcon_h1_is_what_its_config_json_says():
    model = load_config([], preset="falcon-h1-0.5b", require_training=False).config.model
    values, _ = from_hf_config(PUBLISHED_FALCON)
    assert {name: getattr(model, name) for name in values} == values
    written = to_hf_config(spec_from_config(model))
    assert {key: written[key] for key in PUBLISHED_FALCON} == PUBLISHED_FALCON


@pytest.mark.parametrize(
    "preset",
    [
        *("mamba2-130m", "nemotron-h-8b", "bamba-9b", "falcon-h1-0.5b"),
        *map(later, ("mamba2-370m", "mamba2-780m", "mamba2-1.3b", "mamba2-2.7b")),
    ],
)
def test_transformers_counts_the_parameters_of_a_preset(preset: str):
    spec = model_spec(load_config([], preset=preset, require_training=False).config)
    config = AutoConfig.for_model(**to_hf_config(spec))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(param.numel() for param in model.parameters()) == parameter_count(spec)


@pytest.mark.parametrize(
    "flags", ["M*-- --mamba-num-heads 6 --mamba-num-groups 3", "*-*- --swiglu --softmax-scale 0.2"]
)
def test_transformers_computes_a_model_of_ours(flags: str, tmp_path: Path):
    """One whose heads are no multiple of the width, and one without Mamba-2."""
    run = load_config(f"{BASE} {flags}".split()).config
    model, spec = build_model(run, ParallelMesh.single()), model_spec(run)
    weights: dict[str, torch.Tensor] = {}
    for group in model.param_groups:
        for piece, view in group_tensor_shards(group, group.weights()):
            weights[piece.name] = view.reshape(piece.logical_shape).clone()
    content = build_config_json(spec, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(to_hf(content["model_type"], weights, spec), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    tokens = torch.arange(20)[None] % 61
    assert isinstance(model.module, Decoder)
    with torch.no_grad():
        ours = model.module.eval().logits(tokens)
        torch.testing.assert_close(ours, theirs.eval()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", ["MM", "M-*-", "P-P-"])
def test_bench_compares_with_transformers(pattern: str):
    """Also a model without attention, which takes no kernel for it."""
    flags = "--preset tiny-llama --hidden-size 32 --vocab-size 64 --device cpu --no-compile --fp64"
    flags += "" if pattern == "MM" else " --key-multiplier 0.3" if "P" in pattern else " --softmax-scale 0.3"
    mamba = f"--hybrid-layer-pattern {pattern} --num-layers {len(pattern)} --mamba-head-dim 8 --mamba-num-groups 1"
    spec = bench_spec(f"{flags} {mamba}".split())
    theirs = build_peer(spec.run, device=torch.device("cpu"), dtype=torch.float64).eval()
    model = build_model(spec.run, ParallelMesh.single())
    weights = {name: value.double() for name, value in theirs.state_dict().items()}
    fill_model(model.module, model.placements, to_logical(theirs.config.model_type, weights, model_spec(spec.run)))
    ours = model.module.eval()
    tokens = torch.arange(10)[None]
    assert isinstance(ours, Decoder)
    with torch.no_grad():  # transformers scans in float32
        torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=0, atol=1e-4, check_dtype=False)
