"""Rows between layers: the same numbers as tokens, in both memory orders, where every branch takes rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from petatron.layers.forward_context import ForwardContext
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.token_rows import TokenRows, is_batch_first
from petatron.layers.transformer_layer import TransformerLayer
from petatron.models.decoder_spec import decoder_spec
from petatron.models.stage_interface import run_layers_sequentially
from petatron.validate import load_config
from tests.longform import diagonal

FLAGS = (
    "--preset tiny-llama --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --vocab-size 67 --seq-length 6 "
    "--mock-data --lr 1e-3 --train-iters 1 --fp64 "
)
VARIANTS = {
    "llama": "",
    "qk-norm": "--qk-layernorm",
    "gpt": "--normalization LayerNorm --activation gelu --add-bias-linear",
    "no rope": "--position-embedding-type learned_absolute",
    "gate": "--attention-output-gate",
}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_rows_and_back(length: int, batch: int, batch_first: bool):
    x = torch.arange(length * batch * 12.0).view(length, batch, 4, 3)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    rows = TokenRows.of(x)
    flat = rows.flatten(x)
    assert flat.shape == (length * batch, 4, 3) and flat.data_ptr() == x.data_ptr()  # a view
    assert torch.equal(rows.unflatten(flat), x) and is_batch_first(rows.unflatten(flat)) == is_batch_first(x)
    assert torch.equal(rows.flatten_heads(x), flat.flatten(1))


def built_layers(flags: str) -> tuple[list[TransformerLayer], ForwardContext]:
    run = load_config((FLAGS + flags).split(), world_size=1).config
    spec = decoder_spec(run.model, run.moe)
    layers = [spec.layers[index].build(index).double() for index in range(2)]
    generator = torch.Generator().manual_seed(3)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
    cos_sin = {rope: RotaryEmbedding(rope)(torch.arange(6), torch.float64) for rope in spec.ropes}
    return layers, ForwardContext(cos_sin)


def outcome(layers: list[TransformerLayer], x: Tensor, context: ForwardContext) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = run_layers_sequentially(layers, leaf, context)
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *weights])]


@diagonal(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("batch", "batch_first"), [(1, False), (3, False), (3, True)])
def test_rows_give_what_tokens_give(variant: str, batch: int, batch_first: bool):
    layers, context = built_layers(VARIANTS[variant])
    x = torch.randn(6, batch, 32, dtype=torch.float64)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    seen: list[int] = []
    layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dim()))
    assert all(layer.takes_rows for layer in layers)
    rows = outcome(layers, x, context)
    for layer in layers:
        layer.takes_rows = False
    tokens = outcome(layers, x, context)
    assert seen == [2, 3] and rows[0].shape == x.shape and is_batch_first(rows[0]) == is_batch_first(x)
    for found, expected in zip(rows, tokens, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_branch_that_does_not_take_rows_gets_tokens():
    layers, context = built_layers("--num-experts 4 --moe-router-topk 2")
    assert not any(layer.takes_rows for layer in layers)
    seen: list[int] = []
    layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dim()))
    run_layers_sequentially(layers, torch.randn(6, 2, 32, dtype=torch.float64), context)
    assert seen == [3]
