"""Parameters and FLOPs of models with experts, against the built model and torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.estimate.flops import flops_formula, model_flops_per_token, parameter_count
from petatron.models.batch import Batch
from petatron.models.registry import spec_from_config
from tests.run_stage import run_stage

GATED = ModelConfig(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    num_query_groups=1,
    kv_channels=8,
    seq_length=12,
    max_position_embeddings=12,
    vocab_size=128,
    make_vocab_size_divisible_by=128,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
PLAIN = replace(GATED, activation="gelu", add_bias_linear=True, normalization="LayerNorm")
MOE = MoEConfig(num_experts=5, moe_ffn_hidden_size=20, moe_router_topk=2, moe_layer_freq="[0, 1, 1]")
RICH = replace(
    MOE, moe_latent_size=6, moe_shared_expert_intermediate_size=10, moe_shared_expert_gate=True, moe_router_topk=3
)


@pytest.mark.parametrize("model", [GATED, PLAIN], ids=["gated", "plain-bias"])
@pytest.mark.parametrize("moe", [MOE, RICH], ids=["routed", "shared-latent"])
def test_parameter_count_is_what_the_model_has(model: ModelConfig, moe: MoEConfig):
    spec = spec_from_config(model, moe)
    assert spec.moe_layers == (1, 2)
    with torch.device("meta"):
        built = spec.build_stage(spec.whole_model)
    sizes = {name: parameter.numel() for name, parameter in built.named_parameters()}
    assert parameter_count(spec) == sum(sizes.values())
    unmet = sum(
        size * (moe.num_experts - moe.moe_router_topk) // moe.num_experts
        for name, size in sizes.items()
        if ".experts." in name
    )
    assert parameter_count(spec, active=True) == sum(sizes.values()) - unmet


@pytest.mark.parametrize("moe", [MOE, RICH], ids=["routed", "shared-latent"])
def test_flops_are_what_torch_counts(moe: MoEConfig):
    tokens = torch.zeros(2, 12, dtype=torch.long)
    spec = spec_from_config(GATED, moe)
    built = spec.build_stage(spec.whole_model)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run_stage(built, Batch(tokens, tokens, torch.ones(2, 12)), loss_weights_SB=torch.ones(12, 2)).sum().backward()
    expected = model_flops_per_token(spec, causal=False)
    assert counter.get_total_flops() == 2 * 12 * expected


def test_mixtral_has_its_published_sizes():
    mixtral = replace(
        GATED,
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=14336,
        vocab_size=32000,
    )
    moe = MoEConfig(num_experts=8, moe_ffn_hidden_size=14336, moe_router_topk=2)
    spec = spec_from_config(mixtral, moe)
    assert spec.moe_layers == tuple(range(32))
    assert parameter_count(spec) == 46_702_792_704
    assert parameter_count(spec, active=True) == 12_879_925_248


def test_no_layer_with_experts_is_a_dense_model():
    nowhere = spec_from_config(GATED, replace(MOE, num_experts=None, moe_layer_freq="1"))
    dense = spec_from_config(GATED)
    assert nowhere.moe is None and nowhere.moe_layers == ()
    assert parameter_count(nowhere) == parameter_count(dense) == parameter_count(dense, active=True)
    assert model_flops_per_token(nowhere) == model_flops_per_token(dense)


def test_the_formula_names_the_experts():
    assert "K g h e" in flops_formula(experts=True) and "K g h e" not in flops_formula()
    assert "s^2/2" in flops_formula(experts=True) and "s^2/2" not in flops_formula(experts=True, causal=False)
