"""Attention layers that normalize queries and keys: the fused way is the plain one, forward and backward, and keeps less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from petatron.config.schema.model import ModelConfig
from petatron.kernels.attention.visibility import CAUSAL
from petatron.kernels.registry import KernelContext
from petatron.kernels.rope import apply_rope
from petatron.layers.attention import Attention
from petatron.layers.forward_context import ForwardContext
from petatron.layers.rope import RotaryEmbedding
from petatron.models.branch_specs import attention_spec
from petatron.parallel.select_kernels import select_kernels
from tests.unit.models.kept import alive_bytes

S, B, H, K, E = 5, 2, 6, 2, 8
WIDE = torch.float64
Heads = tuple[Tensor, ...]


def layer(dtype: torch.dtype = WIDE, **changes: object) -> Attention:
    shape = {"hidden_size": 16, "num_attention_heads": H, "num_query_groups": K, "kv_channels": E, "qk_layernorm": True}
    kind = {"normalization": "RMSNorm", "position_embedding_type": "rope", "norm_epsilon": 1e-3}
    config = ModelConfig(**{**shape, **kind, **changes})  # pyright: ignore[reportArgumentType]
    made = attention_spec(config).build(0).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def drawn(dtype: torch.dtype, *, batch_first: bool) -> Tensor:
    shape = (B, S) if batch_first else (S, B)
    qkv = torch.randn(*shape, (H + 2 * K) * E, dtype=WIDE).to(dtype)
    return (qkv.transpose(0, 1) if batch_first else qkv).requires_grad_()


def rotation_of(attention: Attention, dtype: torch.dtype) -> ForwardContext:
    positions = torch.randint(0, 50, (B, S))  # as in packed rows, where every document begins at 0
    assert attention.rope is not None
    return ForwardContext({attention.rope: RotaryEmbedding(attention.rope)(positions, dtype)})


def plainly(attention: Attention, qkv: Tensor, passing: ForwardContext) -> Heads:
    q, k, v = qkv.unflatten(-1, (-1, E)).split((H, K, K), dim=2)
    assert attention.q_norm is not None and attention.k_norm is not None
    q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.rope is None:
        return q, k, v
    cos_sin = passing.rope_cos_sin[attention.rope]
    return apply_rope(q, *cos_sin), apply_rope(k, *cos_sin), v


def gradients(heads: Callable[[], Heads], grads: Heads, leaves: list[Tensor]) -> Heads:
    return torch.autograd.grad(heads(), leaves, grads)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_percent": 0.5, "apply_layernorm_1p": True},
        {"normalization": "LayerNorm"},
        {"position_embedding_type": "none"},
    ],
    ids=["rms", "partly-from-one", "layer-norm", "no-positions"],
)
def test_heads_and_gradients_are_those_of_plain_operations(changes: dict[str, object], batch_first: bool):
    attention = layer(**changes)
    qkv = drawn(WIDE, batch_first=batch_first)
    passing = ForwardContext() if attention.rope is None else rotation_of(attention, WIDE)
    leaves = [qkv, *(p for name, p in attention.named_parameters() if "_norm" in name)]
    wanted = plainly(attention, qkv, passing)
    grads = tuple(torch.randn_like(part) for part in wanted)
    for ours, true in zip(attention._split_qkv(qkv, passing), wanted, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
    found = gradients(lambda: attention._split_qkv(qkv, passing), grads, leaves)
    for ours, true in zip(found, gradients(lambda: plainly(attention, qkv, passing), grads, leaves), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("batch_first", [False, True])
def test_queries_and_keys_lie_as_the_product_does_and_values_in_it(batch_first: bool):
    attention, qkv = layer(), drawn(WIDE, batch_first=batch_first)
    q, k, v = attention._split_qkv(qkv, rotation_of(attention, WIDE))
    for part in (q, k):
        assert (part.transpose(0, 1) if batch_first else part).is_contiguous()
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    out = attention.core(q, k, v, CAUSAL)
    assert out.shape == (S, B, H, E)


def test_nothing_is_kept_but_the_product():
    attention, held = layer(), []
    passing, x = rotation_of(attention, WIDE), drawn(WIDE, batch_first=False)
    (cos_sin,) = passing.rope_cos_sin.values()

    def run() -> None:
        q, k, _ = attention._split_qkv(x * 1.0, passing)
        held.append((q.grad_fn, k.grad_fn))

    kept = alive_bytes(run, without=[x, *attention.parameters(), *cos_sin])
    assert kept == S * B * (H + 2 * K) * E * 8


class Taker:
    """Adds gradients up in float32."""

    defers = False

    def __init__(self) -> None:
        self.taken: dict[Tensor, Tensor] = {}

    def submit(
        self, weight: Tensor, write: Callable[[Tensor, bool], None], *, now: bool = False, start_comm: object = None
    ):
        assert now and start_comm is None
        out = self.taken.setdefault(weight, torch.zeros(weight.shape))
        write(out, True)


def test_weight_gradients_go_to_their_taker_unrounded():
    attention, taker = layer(torch.bfloat16), Taker()
    qkv, passing = drawn(torch.bfloat16, batch_first=True), rotation_of(attention, torch.bfloat16)
    assert attention.qk_rms_norms is not None
    for norm in attention.qk_rms_norms:
        norm.weight_grad_target = taker
    made = attention._split_qkv(qkv, passing)
    grads = tuple(torch.randn_like(part) for part in made)
    torch.autograd.backward(made, grads)
    exact = layer()
    exact.load_state_dict({name: value.double() for name, value in attention.state_dict().items()})
    assert exact.qk_rms_norms is not None
    wide = ForwardContext({rope: (cos.double(), sin.double()) for rope, (cos, sin) in passing.rope_cos_sin.items()})
    wanted = gradients(
        lambda: exact._split_qkv(qkv.detach().double(), wide),
        tuple(grad.double() for grad in grads),
        [norm.weight for norm in exact.qk_rms_norms],
    )
    for norm, true in zip(attention.qk_rms_norms, wanted, strict=True):
        assert norm.weight.grad is None
        torch.testing.assert_close(taker.taken[norm.weight].double(), true, rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_gets_no_gradient():
    attention, qkv = layer(), drawn(WIDE, batch_first=False)
    assert attention.qk_rms_norms is not None
    attention.qk_rms_norms[0].weight.requires_grad_(False)
    q, k, v = attention._split_qkv(qkv, rotation_of(attention, WIDE))
    (q.sum() + k.sum() + v.sum()).backward()
    frozen, trained = attention.qk_rms_norms
    assert frozen.weight.grad is None and trained.weight.grad is not None


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "qk-norm and rotary embedding"),
        ({"normalization": "LayerNorm"}, "rotary embedding"),
        ({"qk_layernorm": False}, "rotary embedding"),
    ],
)
def test_what_is_chosen_is_what_the_layer_uses(changes: dict[str, object], wanted: str):
    attention = layer(**changes)
    chosen = {choice.operation for choice in select_kernels(attention, KernelContext("cpu", (0, 0), WIDE, False, None))}
    assert {name for name in chosen if "rotary" in name} == {wanted}
