"""The delta rule of gated delta nets and Kimi delta attention, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec


def plain_delta_rule(
    channels: Tensor,
    beta_SBH: Tensor,
    decays: Tensor,
    gate: Tensor,
    weights: dict[str, Tensor],
    spec: GatedDeltaNetSpec,
) -> Tensor:
    """From convolved q | k | v to the layer's output, token by token, head by head.

    decays: [S, B, H, N], or [S, B, H, 1] where a head has one.
    """
    N, P, shared_by = spec.key_head_dim, spec.value_head_dim, spec.num_value_heads // spec.num_key_heads
    keys = spec.num_key_heads * N
    q, k, v = channels.split((keys, keys, spec.inner_size), dim=-1)
    outputs = []
    for head in range(spec.num_value_heads):
        of_key, of_value = slice(head // shared_by * N, (head // shared_by + 1) * N), slice(head * P, (head + 1) * P)
        state, of_head = q.new_zeros(q.shape[1], N, P), []
        for token in range(len(q)):
            key, query = _unit(k[token, :, of_key]), _unit(q[token, :, of_key]) / math.sqrt(N)
            state = decays[token, :, head, :, None] * state
            missing = v[token, :, of_value] - torch.einsum("bnp,bn->bp", state, key)
            state = state + beta_SBH[token, :, head, None, None] * torch.einsum("bn,bp->bnp", key, missing)
            of_head.append(torch.einsum("bnp,bn->bp", state, query))
        o = torch.stack(of_head)
        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + spec.norm_eps) * weights["norm.weight"]
        outputs.append(normed * gate[..., of_value])
    return torch.cat(outputs, dim=-1) @ weights["out_proj.weight"].T


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
