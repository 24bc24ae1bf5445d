"""HSTU against its published formula, token by token and head by head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.layers.forward_context import ForwardContext
from petatron.layers.hstu import TIMESTAMPS, Hstu, HstuSpec, time_buckets

SPEC = HstuSpec(
    hidden_size=10, num_heads=3, head_dim=4, value_dim=2, max_length=9, time_buckets=20, norm_eps=1e-5,
    out_bias=True, dropout=0.0, std=0.1, out_std=0.1,
)  # fmt: skip


def built(spec: HstuSpec = SPEC) -> Hstu:
    torch.manual_seed(5)
    layer = spec.build(0).to(torch.float64)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        name: param.shape for name, param in spec.params().items()
    }
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def published(layer: Hstu, x_SBD: Tensor, times_BS: Tensor) -> Tensor:
    """The paper's equations 1 to 3, of one token, head and pair at a time."""
    spec, out = layer.spec, torch.zeros_like(x_SBD)
    position, time = layer.core.position_bias.tolist(), layer.core.time_bias.tolist()
    for b in range(x_SBD.shape[1]):
        uvqk = torch.nn.functional.silu(x_SBD[:, b] @ layer.in_proj.weight.t())
        u, v, q, k = uvqk.split([6, 6, 12, 12], dim=1)
        for i in range(x_SBD.shape[0]):
            attended = torch.zeros(6, dtype=torch.float64)
            for j in range(i + 1):
                seconds = max(1, abs(int(times_BS[b, i]) - int(times_BS[b, j])))
                bucket = min(19, int(math.log(seconds) / 0.301))
                for head in range(3):
                    score = float(q[i, 4 * head : 4 * head + 4] @ k[j, 4 * head : 4 * head + 4])
                    weight = silu(score + position[i - j] + time[bucket]) / spec.max_length
                    attended[2 * head : 2 * head + 2] += weight * v[j, 2 * head : 2 * head + 2]
            normed = torch.nn.functional.layer_norm(attended, (6,), eps=spec.norm_eps)
            out[i, b] = layer.out_proj.weight @ (normed * u[i]) + layer.out_proj.bias
    return out


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(7, 2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([[0, 3, 3, 90, 4000, 10**6, 10**9]] * 2) + torch.arange(2).unsqueeze(1) * 17


def test_a_layer_computes_the_published_formula():
    layer, (x, times) = built(), inputs()
    out = layer(x, ForwardContext(tensors={TIMESTAMPS: times}))
    assert torch.allclose(out, published(layer, x, times), rtol=1e-12, atol=1e-12)


def test_no_item_sees_a_later_one():
    layer, (x, times) = built(), inputs()
    changed = x.clone()
    changed[4:] += 1.0
    context = ForwardContext(tensors={TIMESTAMPS: times})
    first, second = layer(x, context), layer(changed, context)
    assert torch.equal(first[:4], second[:4]) and not torch.equal(first[4:], second[4:])


def test_without_buckets_times_do_not_matter():
    spec = HstuSpec(**{name: getattr(SPEC, name) for name in SPEC.__slots__} | {"time_buckets": 0})
    layer, (x, times) = built(spec), inputs()
    assert torch.equal(layer(x, ForwardContext()), layer(x, ForwardContext(tensors={TIMESTAMPS: times})))


def test_a_batch_without_times_is_refused():
    layer, (x, _) = built(), inputs()
    with pytest.raises(DataError, match="has no array 'timestamps'"):
        layer(x, ForwardContext())


def test_buckets_grow_with_the_logarithm_of_time():
    times = torch.tensor([[0, 1, 2, 60, 86_400, 10**12]])
    assert time_buckets(times, 64)[0, 0].tolist() == [0, 0, 2, 13, 37, 63]
