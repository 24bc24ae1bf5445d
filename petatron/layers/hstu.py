"""HSTU, the layers of generative recommenders (Zhai et al., "Actions Speak Louder than Words", 2024).

    u | v | q | k  =  silu(W_in x)                                        one GEMM
    a_ij           =  silu(q_i k_j^T + p_(i-j) + t_b(|s_i - s_j|)) / N     for j <= i, else 0
    out            =  W_out (norm(a v) u)                                 the norm is over the channels of all heads, without weights

p has a value for each distance of positions, t one for each bucket of the time between two interactions, both shared by all heads:
b(d) = floor(ln(max(d, 1)) / 0.301), at most the last bucket. N is the longest sequence of the model. Scores pass a pointwise silu instead
of a softmax, so that the sum over the history says how strong an interest is, and not only how it compares with others; the gate u takes
the place of an MLP.

Tensor parallelism shares out heads; the norm needs two sums over the ranks per token, one in each direction, and the gradients of both
tables are partial sums. Whole sequences: context parallelism would need the times of all ranks.

All scores of a micro-batch exist at once, which histories of some hundred items allow; `core_attn` is a region that recomputes them.

S sequence, B batch, D hidden, H heads of this rank, E width of queries and keys, V width of values, C channels of all heads on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.base.errors import DataError
from petatron.layers.dropout import Dropout
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import CommSlot, identity
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, BranchSpec
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.sharding.shard_spec import Section, Shard

TIMESTAMPS = "timestamps"
"""The array [B, S] of a batch with the time of each interaction, in seconds, and the name of the tensor that layers get it by."""
_BUCKET_WIDTH = 0.301


@dataclass(frozen=True, slots=True, kw_only=True)
class HstuSpec(BranchSpec):
    """HSTU.

    head_dim, value_dim: widths of queries and keys, and of values and gates, of a head. max_length: the N of the formula.
    time_buckets: of the time between interactions; 0: times are not used. dropout: on the input of the last GEMM.
    """

    name = "hstu"
    title = "HSTU"
    region = "attention"
    inner_regions = ("core_attn",)

    hidden_size: int
    num_heads: int
    head_dim: int
    value_dim: int
    max_length: int
    time_buckets: int
    norm_eps: float
    out_bias: bool
    dropout: float
    std: float
    out_std: float

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def sections(self) -> Mapping[str, int]:
        inner, qk = self.inner_size, self.num_heads * self.head_dim
        return {"u": inner, "v": inner, "q": qk, "k": qk}

    def build(self, layer_index: int) -> Hstu:
        return Hstu(self)

    def params(self) -> Mapping[str, ParamSpec]:
        sections = tuple(Section(name, rows, self.num_heads) for name, rows in self.sections.items())
        in_proj = linear_params(
            self.hidden_size, self.sections, Shard(tp=0, sections=sections), bias=False, std=self.std
        )
        out_proj = linear_params(self.inner_size, self.hidden_size, Shard(tp=1), bias=self.out_bias, std=self.out_std)
        # Every rank has other heads, whose gradients of the tables add up.
        table = Shard(partial_grad="always")
        tables = {"position_bias": ParamSpec(shape=(self.max_length,), shard=table)}
        if self.time_buckets:
            tables["time_bias"] = ParamSpec(shape=(self.time_buckets,), shard=table)
        return with_prefix("in_proj", in_proj) | with_prefix("core", tables) | with_prefix("out_proj", out_proj)

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        tokens_seen = seq_length * (0.5 if causal else 1.0)
        return 3.0 * 2.0 * seq_length * tokens_seen * self.num_heads * (self.head_dim + self.value_dim)

    def _core_saved_bytes(self, shape: ActivationShape) -> int:
        """Scores before and after silu, copies of q, k and v by heads, a bucket for each pair, the distance and the mask."""
        pairs = shape.batch * shape.whole_sequence * shape.sequence
        buckets = 8 * pairs if self.time_buckets else 0
        heads = self.num_heads // shape.tp
        copies = shape.activation_bytes(shape.gathered_tokens, heads * (2 * self.head_dim + self.value_dim))
        return 2 * shape.activation_bytes(pairs, heads) + copies + buckets + 9 * shape.whole_sequence * shape.sequence

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, inner = shape.gathered_tokens, self.inner_size // shape.tp
        in_proj = sum(self.sections.values()) // shape.tp
        # The first GEMM's output and its silu, the output of attention, its norm, the product with the gates.
        saved = shape.activation_bytes(rows, 2 * in_proj + 3 * inner) + 2 * rows * shape.compute_bytes
        if self.dropout:
            saved += rows * inner * (1 if shape.byte_dropout_masks else shape.element_bytes)
        saved += shape.fp8_column_input_bytes(self.hidden_size) + shape.fp8_requantized_bytes(inner)
        return saved + (0 if "core_attn" in recomputed else self._core_saved_bytes(shape))

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        if region == "core_attn":
            pairs = shape.batch * shape.whole_sequence * shape.sequence
            return 2.0 * pairs * self.num_heads * (self.head_dim + self.value_dim) / shape.tp
        return self.forward_flops(shape)


class HstuAttention(nn.Module):
    """Pointwise attention: silu(q k^T + biases) / N of the items up to each, times their values."""

    def __init__(self, spec: HstuSpec) -> None:
        super().__init__()
        self.max_length, self.time_buckets = spec.max_length, spec.time_buckets
        self.position_bias = nn.Parameter(torch.empty(spec.max_length))
        self.time_bias = nn.Parameter(torch.empty(spec.time_buckets)) if spec.time_buckets else None

    def forward(self, q_SBHE: Tensor, k_SBHE: Tensor, v_SBHV: Tensor, timestamps_BS: Tensor | None) -> Tensor:
        """Returns [S, B, H, V]."""
        length, device = q_SBHE.shape[0], q_SBHE.device
        distance_SS = (positions := torch.arange(length, device=device)).unsqueeze(1) - positions
        bias = self.position_bias[distance_SS.clamp(min=0)]
        if self.time_bias is not None:
            if timestamps_BS is None:
                raise DataError(
                    "HSTU has a bias of times, and the batch has no array 'timestamps'. Give histories with times, or "
                    "--hstu-time-buckets 0."
                )
            bias = bias + self.time_bias[time_buckets(timestamps_BS, self.time_buckets)].unsqueeze(1)
        q_BHSE, k_BHES, v_BHSV = q_SBHE.permute(1, 2, 0, 3), k_SBHE.permute(1, 2, 3, 0), v_SBHV.permute(1, 2, 0, 3)
        weights_BHSS = F.silu(q_BHSE @ k_BHES + bias.to(q_SBHE.dtype)) / self.max_length
        weights_BHSS = weights_BHSS.masked_fill(distance_SS < 0, 0.0)
        return (weights_BHSS @ v_BHSV).permute(2, 0, 1, 3)


def time_buckets(timestamps_BS: Tensor, count: int) -> Tensor:
    """Returns the bucket [B, S, S] of the time between each two interactions.

    >>> time_buckets(torch.tensor([[0, 1, 1000]]), 128)[0]
    tensor([[ 0,  0, 22],
            [ 0,  0, 22],
            [22, 22,  0]])
    """
    between = (timestamps_BS.unsqueeze(2) - timestamps_BS.unsqueeze(1)).abs().clamp(min=1)
    return (between.double().log() / _BUCKET_WIDTH).long().clamp(max=count - 1)


class _SumOverRanks(AutogradOp):
    """Sums what ranks have of a sum over channels; each uses the sum for its own channels, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: CommSlot) -> Tensor:
        ctx.total = total
        return total(x.clone())

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.total(grads[0].clone(memory_format=torch.contiguous_format)), None


class Hstu(BranchModule):
    """out_proj(norm(attention(q, k, v)) u); u, v, q and k are one GEMM, stored as four logical tensors."""

    fp8_linears = ("in_proj", "out_proj")

    def __init__(self, spec: HstuSpec) -> None:
        super().__init__()
        self.spec = spec
        self.in_proj = Linear(spec.hidden_size, tuple(spec.sections.values()), bias=False)
        self.core = HstuAttention(spec)
        self.out_proj = Linear(spec.inner_size, (spec.hidden_size,), bias=spec.out_bias)
        self.dropout = Dropout(spec.dropout)
        self.sum_over_ranks: CommSlot = identity
        self.group_sum_slots = {"sum_over_ranks": 1}

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"core_attn": self.core, "attention": self}

    def forward(self, x: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        u, v, q, k = F.silu(self.in_proj(x)).split(self.in_proj.sections, dim=-1)
        heads: Callable[[Tensor, int], Tensor] = lambda y, width: y.unflatten(-1, (-1, width))  # noqa: E731
        spec = self.spec
        y_SBHV = self.core(
            heads(q, spec.head_dim),
            heads(k, spec.head_dim),
            heads(v, spec.value_dim),
            context.tensors.get(TIMESTAMPS) if spec.time_buckets else None,
        )
        return self.out_proj(self.dropout(self._norm(y_SBHV.flatten(-2)) * u))

    def _norm(self, y_SBC: Tensor) -> Tensor:
        """Normalizes over the channels of all heads, on all ranks."""
        wide = y_SBC.to(torch.promote_types(y_SBC.dtype, torch.float32))
        count = self.spec.inner_size
        mean: Tensor = _SumOverRanks.apply(wide.sum(dim=-1, keepdim=True), self.sum_over_ranks) / count  # pyright: ignore[reportOperatorIssue]
        centered = wide - mean
        square: Tensor = _SumOverRanks.apply(centered.square().sum(dim=-1, keepdim=True), self.sum_over_ranks)  # pyright: ignore[reportAssignmentType]
        return (centered * torch.rsqrt(square / count + self.spec.norm_eps)).to(y_SBC.dtype)
