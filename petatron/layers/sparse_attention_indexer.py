"""The indexer of sparse attention (DeepSeek-V3.2's lightning indexer): scores every token for every query, cheaply.

    q_j = rope(W_q c_q), of J heads     k = rope(norm(W_k x)), one for all heads     w = W_w x / sqrt(J E)
    I(t, s) = sum_j w_j(t) relu(q_j(t) . k(s))

c_q is what queries of attention are computed from, their latent. Rope rotates the first channels of a head, as wide as the rotary part
of latent attention and with its positions: pairs half of that apart (DeepSeek-V3.2), or neighbors (GLM-5). Then a Hadamard matrix
rotates queries and keys, which leaves their products, and in low precision their rounding errors, smaller.

An indexer learns from its own loss alone (`kernels/attention/indexer_loss.py`): its inputs are detached, and top-k selection has no
gradient.

Its weights are whole on every tensor-parallel rank. Under sequence parallelism a rank projects its own tokens, and what is projected is
all-gathered, in one collective.

S sequence, B batch, D hidden, J heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp
from petatron.kernels.attention.indexer_loss import IndexVectors
from petatron.kernels.attention.sparse_latent_attention import hadamard_rotation
from petatron.kernels.rope import apply_rope
from petatron.layers.forward_context import RopeCosSin
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.rope import pairs_apart
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """An indexer, and what is done with its scores.

    q_input_size: the width of what its queries are computed from. topk: how many tokens a query selects.
    rope_interleaved: whether rotary pairs are neighbors. rotates: whether a Hadamard matrix rotates queries and keys.
    loss_coeff: the coefficient of its loss; 0: it is not trained. sparse_loss: whether the loss is over the selected tokens.
    """

    hidden_size: int
    q_input_size: int
    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    rotates: bool
    relu: bool
    k_norm: NormSpec
    std: float
    loss_coeff: float
    sparse_loss: bool

    def params(self) -> Mapping[str, ParamSpec]:
        params: dict[str, ParamSpec] = {}
        for name, width, rows in (
            ("q_up", self.q_input_size, self.num_heads * self.head_dim),
            ("k", self.hidden_size, self.head_dim),
            ("head_weights", self.hidden_size, self.num_heads),
        ):
            params |= with_prefix(name, linear_params(width, rows, REPLICATED, bias=False, std=self.std))
        return params | with_prefix("k_norm", self.k_norm.params())

    @property
    def gathered_width(self) -> int:
        """Channels per token of the gathered queries, key and head weights."""
        return (self.num_heads + 1) * self.head_dim + self.num_heads

    def gemm_flops(self) -> float:
        """Returns the operations of one token's projections."""
        down = self.hidden_size * (self.head_dim + self.num_heads)
        return 2.0 * (down + self.q_input_size * self.num_heads * self.head_dim)


class Indexer(nn.Module):
    """Computes index queries, keys and head weights of all tokens of its rank's attention."""

    tensor_slots: Mapping[str, TensorSlot] = {"whole_sequence": "whole sequence"}

    def __init__(self, spec: IndexerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.q_up = Linear(spec.q_input_size, (spec.num_heads * spec.head_dim,), bias=False)
        self.k = Linear(spec.hidden_size, (spec.head_dim,), bias=False)
        self.k_norm = spec.k_norm.build()
        self.head_weights = Linear(spec.hidden_size, (spec.num_heads,), bias=False)
        self.whole_sequence: CommSlot = identity

    def forward(
        self, x: Tensor | RecomputableOutput, q_latent: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None
    ) -> IndexVectors:
        """Returns [S, B, J, E], [S, B, E] and [S, B, J]; packed rows of a generation step are a batch of one sequence."""
        spec, x = self.spec, _stop_gradient(x)
        parts = (self.q_up(_stop_gradient(q_latent)), self.k_norm(self.k(x)), self.head_weights(x))
        joined = self.whole_sequence(torch.cat(parts, dim=-1))
        joined = joined.unsqueeze(1) if joined.dim() == 2 else joined
        q, k, weights = joined.split((spec.num_heads * spec.head_dim, spec.head_dim, spec.num_heads), dim=-1)
        q = self._rotated(q.unflatten(-1, (-1, spec.head_dim)), cos_sin)
        k = self._rotated(k.unsqueeze(2), cos_sin).squeeze(2)
        return IndexVectors(q, k, weights * (spec.num_heads * spec.head_dim) ** -0.5)

    def _rotated(self, x_SBJE: Tensor, cos_sin: RopeCosSin | None) -> Tensor:
        if cos_sin is not None:
            width = cos_sin[0].shape[-1]
            x_SBJE = apply_rope(pairs_apart(x_SBJE, width) if self.spec.rope_interleaved else x_SBJE, *cos_sin)
        return hadamard_rotation(x_SBJE) if self.spec.rotates else x_SBJE


class _StopGradient(AutogradOp):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def _stop_gradient(x: Tensor | RecomputableOutput) -> Tensor | RecomputableOutput:
    """Returns an input whose gradient ends here. Unlike a detached one it is still after what it was computed from: a GEMM of an output
    that is recomputed in backward must have its turn before that.
    """
    value = x.value if isinstance(x, RecomputableOutput) else x
    stopped: Tensor = _StopGradient.apply(value) if value.requires_grad else value  # pyright: ignore[reportAssignmentType]
    return RecomputableOutput(stopped, x.handle) if isinstance(x, RecomputableOutput) else stopped
