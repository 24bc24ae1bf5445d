"""A layer kind's spec says what its module is: parameters, norms and their placement, masks, bytes saved for backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from petatron.estimate.activation_bytes import layer_bytes
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.attention import AttentionSpec
from petatron.layers.forward_context import ForwardContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.transformer_layer import LayerSpec, TransformerLayer
from petatron.models.branch_specs import attention_spec
from petatron.models.decoder_spec import decoder_spec
from petatron.models.registry import model_spec
from petatron.models.stage_interface import run_layers_sequentially
from petatron.validate import load_config
from tests.unit.models.kept import kept_bytes

S, B = 12, 2
MODELS = {
    "llama": "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope",
    "gpt": "--position-embedding-type learned_absolute",
    "qwen": "--qk-layernorm --normalization RMSNorm --add-qkv-bias --disable-bias-linear --position-embedding-type rope",
    "1p": "--apply-layernorm-1p --hidden-dropout 0.1",
    "tied": "--no-untie-embeddings-and-output-weights",
    "experts": "--num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 24",
    "latent": "--num-experts 4 --moe-latent-size 16 --moe-shared-expert-intermediate-size 24 --swiglu",
    "latent attention": "--multi-latent-attention --num-query-groups 4 --q-lora-rank 12 --qk-layernorm --position-embedding-type rope",
    "hidden queries": "--multi-latent-attention --num-query-groups 4 --position-embedding-type yarn",
    "mamba": "--hybrid-layer-pattern MM --mamba-head-dim 8 --mamba-num-groups 2",
    "hybrid": "--num-layers 4 --hybrid-layer-pattern M-*E --num-experts 4 --mamba-head-dim 8 --mamba-num-groups 4",
    "parallel": "--num-layers 4 --hybrid-layer-pattern P-PE --num-experts 4 --mamba-head-dim 8 --mamba-num-groups 4 --swiglu "
    "--mamba-gated-norm norm_then_gate --ssm-in-multiplier 2 --attention-out-multiplier 3 --mlp-multipliers 2 3",
    "only gated": "--hybrid-layer-pattern PP --mamba-head-dim 8 --mamba-num-groups 2 --mamba-gated-norm none",
    "delta": "--hybrid-layer-pattern G*E- --num-layers 4 --num-experts 4 --linear-key-head-dim 5 --linear-value-head-dim 6",
    "bloom": "--position-embedding-type alibi --embed-layernorm",
    "mpt": "--position-embedding-type alibi --no-norm-bias --disable-bias-linear --clip-qkv 0.5",
    "gated attention": "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --attention-output-gate",
    "gated shared": "--num-experts 4 --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --swiglu",
}


def run_of(flags: str):
    sizes = (
        f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length {S} --vocab-size 90 "
        f"--micro-batch-size {B} --attention-dropout 0 --untie-embeddings-and-output-weights"
    )
    return load_config([*sizes.split(), *flags.split()], require_training=False).config


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_a_spec_names_the_parameters_of_the_module_it_builds(flags: str):
    spec = model_spec(run_of(flags))
    built = {name: tuple(p.shape) for name, p in spec.build_stage(spec.whole_model).named_parameters()}
    declared = {name: param.shape for name, param in spec.params().items()}
    assert declared == built
    assert list(declared) == list(built), "the order of the modules"


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_weight_decay_is_for_matrices(flags: str):
    for name, param in model_spec(run_of(flags)).params().items():
        assert param.weight_decay == (name.endswith(".weight") and len(param.shape) > 1), name
        is_matrix = param.is_gemm or name.endswith((".mamba.conv.weight", ".delta.conv.weight"))
        assert is_matrix or not name.startswith("layers.") or not param.weight_decay, name


def filled(layer: TransformerLayer) -> TransformerLayer:
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.double().parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return layer


def layer_of(flags: str, **changes: object) -> LayerSpec:
    run = run_of(f"--normalization RMSNorm --position-embedding-type none --hidden-dropout 0 {flags}")
    return replace(decoder_spec(run.model, run.moe).layers[0], **changes)


def rms(x: Tensor, norm: nn.Module) -> Tensor:
    weight: Tensor = norm.weight  # pyright: ignore[reportAssignmentType]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("placement", ["pre", "post", "both"])
def test_where_norms_are(placement: Literal["pre", "post", "both"]):
    layer = filled(layer_of("", norm_placement=placement).build(0))
    x = torch.randn(S, B, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, context = x, ForwardContext()
    for name in ("attention", "mlp"):
        norm, branch = layer.get_submodule(f"{name}_norm"), layer.get_submodule(name)
        if placement == "post":
            expected = rms(expected + branch(expected, context), norm)
        elif placement == "pre":
            expected = expected + branch(rms(expected, norm), context)
        else:
            post = layer.get_submodule(f"{name}_post_norm")
            expected = expected + rms(branch(rms(expected, norm), context), post)
    found = run_layers_sequentially([layer], x, context)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("placement", ["pre", "post", "both"])
@pytest.mark.parametrize("missing", ["mixer", "channel_mixer", None])
def test_bytes_saved(placement: Literal["pre", "post", "both"], missing: str | None):
    """Every memory that lives until backward, but for the layer's input, which is counted with the layer before."""
    spec = layer_of("", norm_placement=placement, **({} if missing is None else {missing: None}))
    run = run_of("--fp64")
    shape = ActivationShape.from_config(run, device="cpu")
    layer = filled(spec.build(0))
    x = torch.randn(S, B, 32, dtype=torch.float64, requires_grad=True)
    measured, _ = kept_bytes(
        lambda: run_layers_sequentially([layer], x * 1.0, ForwardContext()), without=layer.parameters()
    )
    assert measured == layer_bytes(spec, shape)


def test_bidirectional_attention_sees_all_tokens():
    run = run_of("--position-embedding-type none")
    spec = replace(attention_spec(run.model), visibility=Visibility.full())
    attention = spec.build(0).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    x = torch.randn(S, B, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).split((32, 16, 16), -1)
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in (q, k, v))
    k, v = (part.repeat_interleave(2, dim=2) for part in (k, v))
    weights = (torch.einsum("sbhe,tbhe->bhst", q, k) / 8**0.5).softmax(-1)
    expected = torch.einsum("bhst,tbhe->sbhe", weights, v).flatten(-2) @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(attention(x, ForwardContext()), expected, rtol=1e-12, atol=1e-13)
    assert spec.mixing_flops(S, causal=True) == 2 * replace(spec, visibility=Visibility()).mixing_flops(S, causal=True)
    assert isinstance(spec, AttentionSpec) and spec.separates_documents and not spec.can_generate
