"""The tensors of a model folder: nothing of a model is left out or held twice, whatever the model is."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.models.decoder import Decoder
from petatron.models.hf import (
    EntryRegion,
    FolderEntry,
    build_config_json,
    fill_model,
    folder_entries,
    folder_shapes,
    matching_family,
    parse_config_json,
    to_hf,
    to_logical,
)
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec, spec_from_config
from petatron.sharding.shard_spec import ModelParallelCoordinate, compute_placement
from tests.hf.ours import run_config
from tests.hf.zoo import ZOO, truth

_OTHER_POSITIONS: st.SearchStrategy[Literal["learned_absolute", "none"]] = st.sampled_from(("learned_absolute", "none"))


@st.composite
def specs(draw: st.DrawFn, *, usual: bool = False) -> ModelSpec:
    """Small models with experts in some, all or no layers; `usual` leaves out much of what no family has."""
    rotary, heads = draw(st.booleans()), draw(st.sampled_from((1, 2, 4)))
    plain = not rotary and (usual or draw(st.booleans()))
    model = ModelConfig(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=8,
        ffn_hidden_size=draw(st.sampled_from((6, 10))),
        num_attention_heads=heads,
        num_query_groups=heads if plain and usual else draw(st.sampled_from((1, heads))),
        kv_channels=8 // heads if plain and usual else draw(st.sampled_from((2, 8 // heads))),
        vocab_size=11,
        max_position_embeddings=5,
        position_embedding_type="rope" if rotary else "learned_absolute" if usual else draw(_OTHER_POSITIONS),
        normalization="LayerNorm" if not rotary or (not usual and draw(st.booleans())) else "RMSNorm",
        activation=draw(st.sampled_from(("gelu_tanh", "squared_relu") if plain else ("swiglu", "geglu"))),
        add_bias_linear=not rotary or (not usual and draw(st.booleans())),
        add_qkv_bias=draw(st.booleans()),
        qk_layernorm=rotary and draw(st.booleans()),
        window_size=draw(st.sampled_from((None, 3))) if rotary else None,
        untie_embeddings_and_output_weights=draw(st.booleans()),
    )
    if (usual and not rotary) or draw(st.booleans()):
        return spec_from_config(model)
    experts = draw(st.integers(1, 3))
    shared = None if usual and model.qk_layernorm else draw(st.sampled_from((None, 12)))
    moe = MoEConfig(
        num_experts=experts,
        moe_ffn_hidden_size=4,
        moe_router_topk=draw(st.integers(1, experts)),
        moe_router_pre_softmax=draw(st.booleans()),
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=shared is not None and (usual or draw(st.booleans())),
        moe_latent_size=None if usual else draw(st.sampled_from((None, 4))),
    )
    if usual and shared is None and not model.qk_layernorm:  # Mixtral, which has one way to do it
        model, moe = replace(model, add_qkv_bias=False), replace(moe, moe_router_pre_softmax=False)
        return spec_from_config(model, moe)
    pattern = draw(st.lists(st.integers(0, 1), min_size=model.num_layers, max_size=model.num_layers))
    return spec_from_config(model, replace(moe, moe_layer_freq=str(pattern)) if any(pattern) else None)


ANY, USUAL = st.one_of(specs(), specs(usual=True)), specs(usual=True)


def assert_covers(entries: tuple[FolderEntry, ...], spec: ModelSpec) -> None:
    """Every element of every entry is in one region, and every element of every logical tensor too."""
    assert len({entry.name for entry in entries}) == len(entries)
    held = {name: np.zeros(shape, int) for name, shape in folder_shapes(spec).items()}
    for entry in entries:
        counts = torch.zeros(entry.shape, dtype=torch.int64)
        for region in entry.regions:
            assert region.view_in(counts).shape == region.shape, "a region stands outside of its entry"
            assert held[region.name][region.logical_slices()].shape == region.shape
            region.view_in(counts).add_(1)
            held[region.name][region.logical_slices()] += 1
        assert (counts == 1).all(), entry.name
    assert all((counts == 1).all() for counts in held.values())


@pytest.mark.parametrize("name", ZOO)
def test_a_folder_holds_what_transformers_saves(name: str, tmp_path: Path):
    spec = model_spec(run_config(truth(name).config, tmp_path))
    entries = folder_entries(spec, truth(name).config["model_type"])
    assert {entry.name: entry.shape for entry in entries} == {
        key: tuple(value.shape) for key, value in truth(name).weights.items()
    }
    assert_covers(entries, spec)


@settings(max_examples=25, deadline=None)
@given(ANY)
def test_every_model_has_a_folder(spec: ModelSpec):
    entries, family = folder_entries(spec), matching_family(spec)
    assert_covers(entries, spec)
    shapes = folder_shapes(spec)
    if family is None:
        assert {entry.name: entry.shape for entry in entries} == shapes
    else:
        logical = {name: torch.randn(shape) for name, shape in shapes.items()}
        stored = to_hf(family.name, logical, spec)
        assert {name: tuple(value.shape) for name, value in stored.items()} == {e.name: e.shape for e in entries}
        back = to_logical(family.name, stored, spec)
        assert all(torch.equal(back[name], value) for name, value in logical.items())


@settings(max_examples=25, deadline=None)
@given(ANY)
def test_config_json_makes_the_same_folder(spec: ModelSpec):
    content = json.loads(json.dumps(build_config_json(spec, torch.bfloat16)))
    assert (content["model_type"] == "petatron") == (matching_family(spec) is None)
    values, experts = parse_config_json(content)
    again = spec_from_config(replace(spec.config, **values), replace(MoEConfig(), **experts) if experts else None)
    assert again.moe_layers == spec.moe_layers
    assert folder_entries(again) == folder_entries(spec)
    assert build_config_json(again, torch.bfloat16) == content


@settings(max_examples=12, deadline=None)
@given(USUAL)
def test_a_model_of_a_family_computes_the_same_there(spec: ModelSpec):
    """No setting of ours that changes what a model computes is lost on the way to a family."""
    family = matching_family(spec)
    assume(family is not None)
    assert family is not None
    logical = {name: torch.randn(shape) for name, shape in folder_shapes(spec).items()}
    ours, params = spec.build_stage(spec.whole_model).eval(), spec.params()
    assert isinstance(ours, Decoder)
    placements = {
        name: compute_placement(name, tuple(parameter.shape), params[name].shard, ModelParallelCoordinate())
        for name, parameter in ours.named_parameters()
    }
    fill_model(ours, placements, logical)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(build_config_json(spec, torch.float32)))
        save_file(to_hf(family.name, logical, spec), Path(folder, "model.safetensors"), {"format": "pt"})
        theirs, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-3)


def test_regions_of_fused_transposed_matrices_and_of_experts():
    """GPT-2's q, k and v stand side by side in a transposed matrix; an expert has a dimension less than all of them."""
    gpt2 = ModelConfig(
        num_layers=1, hidden_size=4, ffn_hidden_size=6, num_attention_heads=2, num_query_groups=2, kv_channels=2,
        vocab_size=5, max_position_embeddings=3, activation="gelu_tanh",
    )  # fmt: skip
    fused = {entry.name: entry for entry in folder_entries(spec_from_config(gpt2))}[
        "transformer.h.0.attn.c_attn.weight"
    ]
    assert fused.shape == (4, 12)
    assert fused.regions[1] == EntryRegion("layers.0.attention.k.weight", (0, 0), (4, 4), (0, 4), transposed=True)
    mixtral = replace(
        gpt2, position_embedding_type="rope", normalization="RMSNorm", activation="swiglu", add_bias_linear=False
    )
    moe = MoEConfig(num_experts=3, moe_ffn_hidden_size=6)
    entries = {entry.name: entry for entry in folder_entries(spec_from_config(mixtral, moe))}
    expert = entries["model.layers.0.block_sparse_moe.experts.2.w1.weight"]
    assert expert.shape == expert.regions[0].shape_in_entry == (6, 4)
    assert expert.regions == (EntryRegion("layers.0.mlp.experts.gate.weight", (2, 0, 0), (1, 6, 4), (0, 0)),)


def test_the_expert_bias_is_a_tensor_of_the_folder():
    model = ModelConfig(
        num_layers=1, hidden_size=4, ffn_hidden_size=6, num_attention_heads=2, num_query_groups=2, kv_channels=2,
        vocab_size=5, max_position_embeddings=3, position_embedding_type="rope", activation="swiglu",
    )  # fmt: skip
    moe = MoEConfig(
        num_experts=2, moe_ffn_hidden_size=6, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    )
    spec = spec_from_config(model, moe)
    shapes = {entry.name: entry.shape for entry in folder_entries(spec)}
    assert shapes["layers.0.mlp.router.expert_bias"] == (2,) and shapes == folder_shapes(spec)
    assert shapes.keys() - spec.logical_shapes().keys() == {"layers.0.mlp.router.expert_bias"}, "it is no parameter"
