"""A layer of sparse latent attention: what is chosen, whom its indexer's loss trains, and what it has in common with latent attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.kernels.attention.document_layout import Documents
from petatron.layers.forward_context import ForwardContext
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.sparse_mla import INDEXER_LOSS, SparseLatentAttention, SparseMlaSpec
from petatron.models.registry import model_spec
from tests.unit.layers.test_mla import BASE as LATENT
from tests.unit.layers.test_mla import B, D, S, load_config

DSA = f"{LATENT} --q-lora-rank 20 --qk-layernorm --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
LEARNS = "--dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.7"


def layer_of(flags: str) -> SparseLatentAttention:
    """The same weights, whatever the flags."""
    mixer = model_spec(load_config([*DSA.split(), *flags.split()], require_training=False).config).layers[0].mixer
    assert isinstance(mixer, SparseMlaSpec)
    module = mixer.build(3).double()
    assert isinstance(module, SparseLatentAttention)
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def context_of(layer: SparseLatentAttention, positions: Tensor | None = None, **options: object) -> ForwardContext:
    rope = layer.spec.rope
    assert rope is not None
    cos_sin = RotaryEmbedding(rope)(torch.arange(S) if positions is None else positions, torch.float64)
    return ForwardContext({rope: cos_sin}, **options)  # pyright: ignore[reportArgumentType]


def inputs() -> Tensor:
    return torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def grads_of(flags: str, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the input, and those of the weights."""
    layer, x = layer_of(flags), inputs().requires_grad_()
    layer(x, context_of(layer, **options)).square().sum().backward()
    assert x.grad is not None
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
    return x.grad, grads


def test_a_sequence_within_the_choice_is_latent_attention():
    """Bit for bit: with as many tokens as a query keeps, and with more."""
    x, sparse = inputs(), layer_of("--dsa-indexer-topk 4")
    for topk in (S, 4 * S):
        layer = layer_of(f"--dsa-indexer-topk {topk}")
        plain = super(SparseMlaSpec, layer.sparse_spec).build(0).double()
        plain.load_state_dict(layer.state_dict(), strict=False)
        true = plain(x, context_of(layer))
        assert torch.equal(layer(x, context_of(layer)), true)
        assert not torch.allclose(sparse(x, context_of(sparse)), true, atol=1e-3)


def test_first_tokens_see_all_before_them():
    """A query with no more tokens than it keeps before it has the output of latent attention; others have not."""
    x, sparse, dense = inputs(), layer_of("--dsa-indexer-topk 4"), layer_of(f"--dsa-indexer-topk {S}")
    apart = (sparse(x, context_of(sparse)) - dense(x, context_of(dense))).abs().amax((1, 2))
    assert float(apart[:4].max()) < 1e-12 and float(apart[6:].min()) > 1e-4


@pytest.mark.parametrize("sparse", ["", "--dsa-indexer-use-sparse-loss"])
def test_the_loss_trains_the_indexer_and_nothing_else(sparse: str):
    scale = torch.tensor(1.0, dtype=torch.float64)
    without_x, without = grads_of("--dsa-indexer-topk 4", aux_loss_scale=scale)
    with_x, found = grads_of(f"{LEARNS} {sparse}", aux_loss_scale=scale)
    assert torch.equal(without_x, with_x)
    for name, grad in found.items():
        if name.startswith("indexer."):
            assert float(grad.abs().max()) > 1e-6 and not without[name].any(), name
        else:
            assert torch.equal(grad, without[name]), name


def test_the_loss_is_scaled_by_its_coefficient_and_its_scale():
    twice = LEARNS.replace("0.7", "1.4")
    _, one = grads_of(LEARNS, aux_loss_scale=torch.tensor(3.0))
    _, other = grads_of(twice, aux_loss_scale=torch.tensor(1.5))
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_the_log_has_the_loss_of_each_token_in_the_mean():
    layer, x = layer_of(LEARNS), inputs()
    alone = []
    for rows in (x, x[:, :1], x[:, 1:]):
        context = context_of(layer, aux_loss_scale=torch.tensor(1.0))
        layer(rows, context)
        alone.append(float(context.router_statistics[INDEXER_LOSS, 3]))
    assert alone[0] == pytest.approx((alone[1] + alone[2]) / 2) and alone[0] > 1e-3


def test_without_gradients_there_is_no_loss():
    layer = layer_of(LEARNS)
    context = context_of(layer)
    layer(inputs(), context)
    assert not context.router_statistics


@pytest.mark.parametrize("topk", [2, 4, 6])
def test_a_packed_document_is_as_if_alone(topk: int):
    layer, x = layer_of(f"--dsa-indexer-topk {topk}"), inputs()
    starts = torch.tensor([[0] * 3 + [3] * 7] * B)
    positions = torch.arange(S) - starts[0]
    packed = layer(x, context_of(layer, positions, documents=Documents.of(starts)))
    rope = layer.spec.rope
    assert rope is not None
    for part in (slice(0, 3), slice(3, S)):
        cos_sin = RotaryEmbedding(rope)(positions[part], torch.float64)
        torch.testing.assert_close(packed[part], layer(x[part], ForwardContext({rope: cos_sin})))
