"""Tensor names both ways: nothing lost, nothing invented, and every misfit named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from petatron.base.errors import CheckpointError, ConfigError
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf import (
    build_config_json,
    family_name_of_config,
    fill_model,
    folder_shapes,
    matching_family,
    to_hf,
    to_logical,
)
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.sharding.shard_spec import ModelParallelCoordinate, compute_placement
from petatron.train.build_run import build_model
from tests.hf.ours import run_config
from tests.hf.zoo import MIXED, SLOPES, ZOO, build, truth
from tests.longform import diagonal


def spec_of(name: str, folder: Path) -> ModelSpec:
    return model_spec(run_config(truth(name).config, folder))


@pytest.mark.parametrize("name", ZOO)
def test_round_trip(name: str, tmp_path: Path):
    true, spec = truth(name), spec_of(name, tmp_path)
    family = family_name_of_config(true.config)
    logical = to_logical(family, true.weights, spec)
    assert {key: tuple(value.shape) for key, value in logical.items()} == folder_shapes(spec)
    back = to_hf(family, logical, spec)
    assert back.keys() == true.weights.keys()
    for key, value in true.weights.items():
        assert torch.equal(back[key], value) and back[key].is_contiguous(), key


@pytest.mark.parametrize("name", ZOO)
def test_transformers_opens_what_we_write(name: str, tmp_path: Path):
    """A folder of our config.json and tensors makes transformers compute the same logits."""
    true, spec = truth(name), spec_of(name, tmp_path)
    content = build_config_json(spec, torch.float32)
    family = matching_family(spec)
    assert family is not None and content["model_type"] == family.name
    written = to_hf(content["model_type"], to_logical(family_name_of_config(true.config), true.weights, spec), spec)
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
    reread, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    found["missing_keys"] = [key for key in found["missing_keys"] if not key.endswith(SLOPES)]
    assert not any(found.values()), found
    with torch.no_grad():
        # The same weights in other memory: sums of a long recurrence in fp32 may round differently there.
        torch.testing.assert_close(reread.eval()(true.tokens).logits, true.logits, rtol=0, atol=5e-5)


@diagonal(3)
@pytest.mark.parametrize("name", MIXED)
def test_a_model_in_memory_has_the_same_tensors(name: str, tmp_path: Path):
    """transformers joins experts when it loads a model; both kinds of names are read."""
    true, spec = truth(name), spec_of(name, tmp_path)
    family = family_name_of_config(true.config)
    held = build(name).state_dict()
    assert any(key.endswith(("experts.gate_up_proj", "experts.up_proj")) for key in held)
    logical = to_logical(family, held, spec)
    for key, value in to_logical(family, true.weights, spec).items():
        assert torch.equal(logical[key], value), key


def test_bare_model_names_and_buffers(tmp_path: Path):
    """The first GPT-2 checkpoints have no prefix and hold the causal mask."""
    true, spec = truth("gpt2"), spec_of("gpt2", tmp_path)
    old = {key.removeprefix("transformer."): value for key, value in true.weights.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    logical = to_logical("gpt2", old, spec)
    assert all(torch.equal(logical[key], value) for key, value in to_logical("gpt2", true.weights, spec).items())


def test_rotary_buffers_and_a_stored_copy_of_the_tied_head_are_ignored(tmp_path: Path):
    true, spec = truth("llama-mha-tied"), spec_of("llama-mha-tied", tmp_path)
    more = true.weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    more["lm_head.weight"] = true.weights["model.embed_tokens.weight"].clone()
    assert "head.weight" not in to_logical("llama", more, spec)


def _without(key: str) -> Callable[[dict[str, Tensor]], None]:
    def spoil(weights: dict[str, Tensor]) -> None:
        del weights[key]

    return spoil


MISFITS = {
    "missing": ("llama-gqa", _without("model.layers.1.mlp.up_proj.weight"), r"missing: model\.layers\.1\.mlp\.up_proj"),
    "unknown": (
        "llama-gqa",
        lambda weights: weights.update({"model.layers.0.self_attn.sinks": torch.ones(4)}),
        r"not in this model: model\.layers\.0\.self_attn\.sinks",
    ),
    "bias the model lacks": (
        "llama-gqa",
        lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        r"not in this model: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "shape": (
        "gpt2",
        lambda weights: weights.update({"transformer.h.0.attn.c_attn.weight": torch.ones(96, 32)}),
        r"c_attn\.weight is \[96, 32\], but the config makes it \[32, 96\]",
    ),
    "untied head in a tied model": (
        "llama-mha-tied",
        lambda weights: weights.update({"lm_head.weight": torch.ones(61, 32)}),
        "lm_head.weight differs from the embedding, but the config ties them",
    ),
    "missing expert": (
        "mixtral",
        _without("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        r"missing: model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight",
    ),
    "one expert too many": (
        "qwen3-moe",
        lambda weights: weights.update({"model.layers.0.mlp.experts.4.up_proj.weight": torch.ones(24, 32)}),
        r"not in this model: model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight",
    ),
    "shape of an expert": (
        "qwen2-moe",
        lambda weights: weights.update({"model.layers.0.mlp.experts.1.down_proj.weight": torch.ones(24, 32)}),
        r"experts\.1\.down_proj\.weight is \[24, 32\], but the config makes it \[32, 24\]",
    ),
    "shared expert": (
        "qwen2-moe",
        _without("model.layers.0.mlp.shared_expert_gate.weight"),
        r"missing: model\.layers\.0\.mlp\.shared_expert_gate",
    ),
    "no head in an untied model": ("llama-gqa", _without("lm_head.weight"), r"missing: lm_head\.weight"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_named(case: str, tmp_path: Path):
    name, spoil, message = MISFITS[case]
    weights = dict(truth(name).weights)
    spoil(weights)
    with pytest.raises(CheckpointError, match=message):
        to_logical(family_name_of_config(truth(name).config), weights, spec_of(name, tmp_path))


def test_all_misfits_come_at_once(tmp_path: Path):
    weights = dict(truth("qwen2-qkv-bias").weights)
    del weights["model.norm.weight"]
    weights["model.extra"] = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.ones(60, 32)
    with pytest.raises(CheckpointError) as caught:
        to_logical("qwen2", weights, spec_of("qwen2-qkv-bias", tmp_path))
    assert all(word in str(caught.value) for word in ("model.norm.weight", "model.extra", "[60, 32]"))


def test_a_long_list_is_cut(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"and 9 more"):
        to_logical("llama", {}, spec_of("llama-gqa", tmp_path))


def test_writing_checks_its_tensors(tmp_path: Path):
    spec = spec_of("gpt2", tmp_path)
    logical = to_logical("gpt2", truth("gpt2").weights, spec)
    logical["norm.weight"] = torch.ones(33)
    logical["extra"] = logical.pop("norm.bias")
    with pytest.raises(CheckpointError) as caught:
        to_hf("gpt2", logical, spec)
    for text in ("norm.bias is missing", "extra is not a tensor", "norm.weight is [33], but the config makes it [32]"):
        assert text in str(caught.value)


def test_a_family_without_names_for_the_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"llama has no name: position\.weight"):
        to_logical("llama", {}, spec_of("gpt2", tmp_path))


def test_a_family_without_names_for_the_experts(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"qwen3_moe has no name: layers\.0\.mlp\.shared\."):
        to_logical("qwen3_moe", {}, spec_of("qwen2-moe", tmp_path))


def test_unknown_family(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'model_type "mamba".*Families: gpt2, llama, mistral, '):
        to_hf("mamba", {}, spec_of("gpt2", tmp_path))


class TestFill:
    def test_padding_rows_become_zero_and_boxes_are_exact(self, tmp_path: Path):
        """Every rank's boxes of a split model, filled one after the other in this process."""
        spec = spec_of("llama-gqa", tmp_path)
        logical = to_logical("llama", truth("llama-gqa").weights, spec)
        params = spec.params()
        seen = dict.fromkeys(logical, 0)
        for rank in range(4):
            module = spec.build_stage(spec.whole_model)
            placements = {}
            for name, parameter in module.named_parameters():
                place_here = compute_placement(
                    name, tuple(parameter.shape), params[name].shard, ModelParallelCoordinate(4, rank)
                )
                placements[name] = place_here
                parameter.data = torch.full(place_here.shape, float("nan"))
            fill_model(module, placements, logical)
            for name, parameter in module.named_parameters():
                assert not parameter.isnan().any()
                for piece in placements[name].tensor_shards:
                    assert torch.equal(parameter[piece.local_slices()], logical[piece.name][piece.logical_slices()])
                    seen[piece.name] += parameter[piece.local_slices()].numel() * piece.primary
                covered = sum(piece.shape[0] * parameter[0].numel() for piece in placements[name].tensor_shards)
                if covered < parameter.numel():
                    assert not parameter[placements[name].tensor_shards[0].shape[0] :].any()
        assert seen == {name: value.numel() for name, value in logical.items()}

    def test_misfits_are_named(self, tmp_path: Path):
        run = run_config(truth("gpt2").config, tmp_path)
        model = build_model(run, ParallelMesh.single())
        logical = to_logical("gpt2", truth("gpt2").weights, model_spec(run))
        logical["norm.weight"] = torch.ones(31)
        del logical["layers.0.attention.k.bias"]
        with pytest.raises(CheckpointError, match=r"k\.bias is missing; norm\.weight is \[31\] instead of \[32\]"):
            fill_model(model.module, model.placements, logical)

    def test_other_stages_tensors_are_left_alone(self, tmp_path: Path):
        run = run_config(truth("gpt2").config, tmp_path)
        model = build_model(replace(run, model=replace(run.model, num_layers=1)), ParallelMesh.single())
        fill_model(model.module, model.placements, to_logical("gpt2", truth("gpt2").weights, model_spec(run)))
