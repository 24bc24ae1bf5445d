"""Multi-head latent attention (DeepSeek-V2, DeepSeek-V3): keys and values of all heads come from one narrow vector per token.

    q latent   c_q  = norm(W_dq x)                       q = [W_uq c_q without position | rope(...)] of each head
    kv latent  c_kv, k_r = W_dkv x;  norm(c_kv)          k = [W_uk c_kv of each head | rope(k_r) of all heads],   v = W_uv c_kv
    y = W_o softmax(q k^T scale) v                       scale = t^2 / sqrt(width of a query)

Without a query latent, q = W_q x. Without positions (Kimi-Linear) nothing is rotated, and k_r is a part of the keys that all heads share.
With YaRN t is 0.1 mscale_all_dim ln(factor) + 1, else 1. Queries and keys are wider than values. The
rotary pairs are neighbors in the rows of W_uq and W_dkv, as in DeepSeek's and Megatron-LM's weights.

Tensor parallelism shards what has heads, W_uq, W_uk and W_uv by columns and W_o by rows. The down-projections are small and whole on
every rank. Under sequence parallelism they see this rank's tokens, and the sequence is all-gathered *after* them: of a token are sent
its latents, q rank + kv rank + rotary width numbers (2,112 in DeepSeek-V3) instead of hidden size (7,168). Gradients of the
down-projections and of the norms are then partial sums over ranks, as those of every norm are. The rotary key, which heads of all ranks
use, has a communication slot of its own: its gradient is the sum over all heads.

S sequence, B batch, D hidden, H heads of this rank, E width of a query or key head, V of a value head, R rotary width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention import latent_heads as reference_heads
from petatron.kernels.attention import paged_latent_attention
from petatron.kernels.attention.paged_attention import KeyValue, PagedAttentionOp
from petatron.kernels.attention.paged_latent_attention import LatentPages, LatentUpProjection, PagedLatentKernels
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.qk_norm_rope import TensorPair
from petatron.layers.core_attention import CoreAttention
from petatron.layers.forward_context import ForwardContext, RopeCosSin
from petatron.layers.linear import Linear
from petatron.layers.norm import Norm, NormSpec
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL, BranchModule, SoftmaxAttentionSpec
from petatron.layers.spec.generation_state import GenerationStep, PagedState
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.sharding.shard_spec import Section, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(SoftmaxAttentionSpec):
    """Multi-head latent attention.

    q_rank: the width of the query latent; None: queries come from the hidden state.
    kv_rank: the width of the latent of keys and values.
    nope_dim, v_dim: the width of the part of a query or key head without position, and of a value head.
    rotary_dim: the width of the other part of a query or key head, which `rope` rotates; all heads share that of the keys.
    q_norm, kv_norm: the norms of the latents.
    """

    title = "multi-head latent attention"
    can_generate = True

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    rotary_dim: int
    q_norm: NormSpec | None
    kv_norm: NormSpec | None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rotary_dim

    @property
    def query_scale(self) -> float:
        """The factor on queries besides that of attention itself, 1 / sqrt(width): YaRN's temperature, squared."""
        if self.rope is None or self.rope.scaling != "yarn" or self.rope.scaling_factor <= 1.0:
            return 1.0
        return (0.1 * self.rope.mscale_all_dim * math.log(self.rope.scaling_factor) + 1.0) ** 2

    def __post_init__(self) -> None:
        assert paged_latent_attention.VISIBILITY.includes(self.visibility), (
            "latent attention is causal, with or without a window"
        )

    @property
    def prompt_is_capturable(self) -> bool:
        """Keys of a prompt are made of latents, and the host must know for how many tokens."""
        return False

    def batch_dependence(self) -> str | None:
        return "dropout of attention" if self.dropout > 0.0 else None

    def generation_state(self, tp: int) -> PagedState | None:
        """The latent and the rotary key, which all heads share: the same on every rank."""
        return PagedState((("latent", (self.kv_rank,)), ("rope_key", (self.rotary_dim,))))

    def head_state(self, tp: int) -> PagedState:
        """The keys and values of this rank's heads."""
        heads = self.num_heads // tp
        return PagedState((("key", (heads, self.qk_dim)), ("value", (heads, self.v_dim))))

    def build(self, layer_index: int) -> MultiLatentAttention:
        return MultiLatentAttention(self, layer_index)

    def params(self) -> Mapping[str, ParamSpec]:
        heads, rotary = self.num_heads, self.rotary_dim
        q_rows, kv_rows = heads * self.qk_dim, heads * (self.nope_dim + self.v_dim)
        params: dict[str, ParamSpec] = {}
        if self.q_rank is not None:
            down = linear_params(self.hidden_size, self.q_rank, REPLICATED, bias=False, std=self.std)
            params |= with_prefix("q_down", down) | with_prefix("q_norm", _norm_params(self.q_norm))
        q_name = "q" if self.q_rank is None else "q_up"
        params |= with_prefix("q_up", self._up_params(q_name, self.q_input_size, q_rows))
        down = linear_params(self.hidden_size, self.kv_rank + rotary, REPLICATED, bias=False, std=self.std)
        params |= with_prefix("kv_down", down) | with_prefix("kv_norm", _norm_params(self.kv_norm))
        params |= with_prefix("kv_up", self._up_params("kv_up", self.kv_rank, kv_rows))
        out = linear_params(heads * self.v_dim, self.hidden_size, Shard(tp=1), bias=self.out_bias, std=self.out_std)
        return params | with_prefix("out", out)

    def _up_params(self, name: str, width: int, rows: int) -> dict[str, ParamSpec]:
        """Returns the weight of an up-projection, whose rows are shared out by whole heads."""
        by_head = Shard(tp=0, sections=(Section(name, rows, self.num_heads),))
        return linear_params(width, rows, by_head, bias=False, std=self.std)

    @property
    def q_input_size(self) -> int:
        """The width that queries are computed from."""
        return self.hidden_size if self.q_rank is None else self.q_rank

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        visible = min(self.visibility.window or seq_length, seq_length)
        pairs = visible * seq_length - visible * visible / 2 if causal else float(seq_length * seq_length)
        return 6 * self.num_heads * (self.qk_dim + self.v_dim) * pairs

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, heads = shape.gathered_tokens, self.num_heads // shape.tp
        saved = shape.activation_bytes(rows, heads * 2 * (self.qk_dim + self.v_dim))
        saved += self._latent_bytes(shape)
        saved += shape.fp8_column_input_bytes(self.q_input_size, self.kv_rank)
        saved += shape.fp8_requantized_bytes(heads * self.v_dim)
        log_sum_exp = rows * heads * shape.compute_bytes
        return saved + (0 if "core_attn" in recomputed else log_sum_exp)

    def core_saved_bytes(self, shape: ActivationShape) -> tuple[int, int, int]:
        rows, heads = shape.gathered_tokens, self.num_heads // shape.tp
        inputs = shape.activation_bytes(rows, heads * (2 * self.qk_dim + self.v_dim))
        return inputs, shape.activation_bytes(rows, heads * self.v_dim), rows * heads * shape.compute_bytes

    def out_saved_bytes(self, shape: ActivationShape) -> int:
        return shape.fp8_requantized_bytes(self.num_heads // shape.tp * self.v_dim)

    def _latent_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the latents, which norms save with their statistics; rotary keys are in one tensor with theirs."""
        saved = shape.activation_bytes(shape.tokens, (self.q_rank or 0) + self.kv_rank + self.rotary_dim)
        norms = (self.kv_norm, self.q_norm if self.q_rank is not None else None)
        return saved + sum(norm.statistics_bytes(shape, shape.tokens) for norm in norms if norm is not None)

    def regathered_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if not shape.sequence_parallel or shape.fp8_recipe is not None or {self.region, FULL}.isdisjoint(recomputed):
            return 0
        return shape.activation_bytes(shape.gathered_tokens, self.q_input_size + self.kv_rank)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        width = self.num_heads // shape.tp * (self.qk_dim + self.v_dim)
        return shape.activation_bytes(shape.gathered_tokens, width)

    def forward_flops(self, shape: ActivationShape) -> float:
        heads, rows = self.num_heads // shape.tp, shape.gathered_tokens
        down = self.hidden_size * ((self.q_rank or 0) + self.kv_rank + self.rotary_dim)
        up = heads * (self.q_input_size * self.qk_dim + self.kv_rank * (self.nope_dim + self.v_dim))
        gemms = 2.0 * (shape.tokens * down + rows * up)
        return self.norm_flops(shape) + gemms + self.core_flops(shape) + self.out_flops(shape)

    def core_flops(self, shape: ActivationShape) -> float:
        visible = min(self.visibility.window or shape.whole_sequence, shape.whole_sequence)
        heads = self.num_heads // shape.tp
        return float(shape.gathered_tokens * heads * (self.qk_dim + self.v_dim) * visible)

    def out_flops(self, shape: ActivationShape) -> float:
        return 2.0 * shape.gathered_tokens * (self.num_heads // shape.tp) * self.v_dim * self.hidden_size


def _norm_params(norm: NormSpec | None) -> dict[str, ParamSpec]:
    return {} if norm is None else norm.params()


class MultiLatentAttention(BranchModule):
    """out(core(q, k, v)) with q, k and v from latents; the down-projections are small, and stay out of FP8."""

    fp8_linears = ("q_up", "kv_up", "out")
    absorbed_linears = ("kv_up",)
    tensor_slots: Mapping[str, TensorSlot] = {"rotary_key_comm": "whole sequence"}

    def __init__(self, spec: MlaSpec, layer_index: int) -> None:
        super().__init__()
        self.spec, self.layer_index = spec, layer_index
        hidden, heads, rotary = spec.hidden_size, spec.num_heads, spec.rotary_dim
        has_q_latent = spec.q_rank is not None
        self.q_down = Linear(hidden, (spec.q_rank,), bias=False) if spec.q_rank is not None else None
        self.q_norm = spec.q_norm.build() if has_q_latent and spec.q_norm is not None else None
        self.q_up = Linear(spec.q_input_size, (heads * spec.qk_dim,), bias=False)
        self.kv_down = Linear(hidden, (spec.kv_rank + rotary,), bias=False)
        self.kv_norm = None if spec.kv_norm is None else spec.kv_norm.build()
        self.kv_up = Linear(spec.kv_rank, (heads * (spec.nope_dim + spec.v_dim),), bias=False)
        self.rotary_key_comm: CommSlot = identity
        self.head_kernels: LatentHeadKernels = reference_heads
        self.core = CoreAttention(dropout=spec.dropout)
        self.latent_kernels: PagedLatentKernels = paged_latent_attention
        self.attend_to_pages: PagedAttentionOp | None = None
        """Attends to keys and values of heads in pages, computed as training does; None: pages have latents."""
        self.out = Linear(heads * spec.v_dim, (hidden,), bias=spec.out_bias)

    def kernel_slots(self) -> Mapping[str, str]:
        return {"head_kernels": "heads of latent attention", "latent_kernels": "paged latent attention"}

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"core_attn": self.core, "attention": self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        return {"qkv_linear": (self,), "core_attn": (self.core,), "attn_proj": (self.out,)}

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        cos_sin = self._cos_sin(context)
        if context.generation is not None:
            return self.out(self._cached_attention(x_SBD, cos_sin, context.generation).flatten(-2))
        q_SBHE = self._query_heads(self._query_latent(x_SBD), cos_sin)
        k_SBHE, v_SBHV = self._keys_and_values(*self._latents(x_SBD), cos_sin)
        return self.out(self.core(q_SBHE, k_SBHE, v_SBHV, self._visibility(context)).flatten(-2))

    def _cos_sin(self, context: ForwardContext) -> RopeCosSin | None:
        return None if self.spec.rope is None else context.rope_cos_sin[self.spec.rope]

    def _visibility(self, context: ForwardContext) -> Visibility:
        """Returns what a token sees of this batch."""
        visibility = self.spec.visibility
        return visibility if context.documents is None else visibility.of_batch(context.documents)

    def _query_latent(self, x_SBD: Tensor | RecomputableOutput) -> Tensor | RecomputableOutput:
        """Returns what queries are computed from: their latent, or the hidden state."""
        return x_SBD if self.q_down is None else _normed(self.q_norm, self.q_down(x_SBD))

    def _latents(self, x_SBD: Tensor | RecomputableOutput) -> tuple[Tensor | RecomputableOutput, Tensor]:
        """Returns the latent of keys and values, and the rotary key, not yet rotated."""
        latent, rotary_SBR = self.kv_down(x_SBD).split((self.spec.kv_rank, self.spec.rotary_dim), dim=-1)
        return _normed(self.kv_norm, latent), rotary_SBR

    def _query_heads(self, latent: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None) -> Tensor:
        q = self.q_up(latent)
        q = q.unsqueeze(1) if q.dim() == 2 else q  # the packed rows of a generation step as a batch of one sequence
        q_SBHE = q.unflatten(-1, (-1, self.spec.qk_dim))
        return self._rotated(q_SBHE, cos_sin, scale=self.spec.query_scale)

    def _rotated(self, x_SBHE: Tensor, cos_sin: RopeCosSin | None, *, scale: float = 1.0) -> Tensor:
        if cos_sin is None:
            return x_SBHE
        return interleaved_rope(x_SBHE, cos_sin, scale=scale, kernels=self.head_kernels)

    def _cached_attention(
        self, x_TD: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None, step: GenerationStep
    ) -> Tensor:
        """Attends through the pages of this layer to the tokens before; of them only latent and rotary key are known."""
        spec, pages = self.spec, step.pages[self.layer_index]
        if self.attend_to_pages is not None:
            return self._attend_to_heads(x_TD, cos_sin, step)
        latent_TC, rope_key_TR = self._whole_latents(*self._latents(x_TD), cos_sin)
        return paged_latent_attention.paged_latent_attention(
            self._query_heads(self._query_latent(x_TD), cos_sin).squeeze(1),
            latent_TC,
            rope_key_TR,
            LatentPages(pages["latent"], pages["rope_key"]),
            step.batch,
            up=self._up_projection(),
            visibility=spec.visibility,
            kernels=self.latent_kernels,
        )

    def _attend_to_heads(
        self, x_TD: Tensor | RecomputableOutput, cos_sin: RopeCosSin | None, step: GenerationStep
    ) -> Tensor:
        """Attends to keys and values that training would compute too, in the same functions, from the same input."""
        assert self.attend_to_pages is not None
        pages = step.pages[self.layer_index]
        q_THE = self._query_heads(self._query_latent(x_TD), cos_sin).squeeze(1)
        latent, rotary_TR = self._latents(x_TD)
        k, v = self._heads_of_latent(self.kv_up(latent).unsqueeze(1), rotary_TR.unsqueeze(1), cos_sin)
        new, of_layer = KeyValue(k.squeeze(1), v.squeeze(1)), KeyValue(pages["key"], pages["value"])
        return self.attend_to_pages(q_THE, new, of_layer, step.batch, visibility=self.spec.visibility)

    def _up_projection(self) -> LatentUpProjection:
        return LatentUpProjection.of(self.kv_up.merged_weight(), nope_dim=self.spec.nope_dim, v_dim=self.spec.v_dim)

    def _whole_latents(
        self, latent: Tensor | RecomputableOutput, rotary: Tensor, cos_sin: RopeCosSin | None
    ) -> tuple[Tensor, Tensor]:
        """Returns latents and rotated rotary keys of the tokens of all tensor-parallel ranks: what absorbed queries meet."""
        spec = self.spec
        gathered = self.rotary_key_comm(torch.cat((as_recomputable(latent).value, rotary), dim=-1))
        latent, rotary = gathered.split((spec.kv_rank, spec.rotary_dim), dim=-1)
        heads = rotary.unsqueeze(-2) if rotary.dim() == 3 else rotary[:, None, None]
        return latent, self._rotated(heads, cos_sin).reshape(rotary.shape)

    def _keys_and_values(
        self, latent: Tensor | RecomputableOutput, rotary_SBR: Tensor, cos_sin: RopeCosSin | None
    ) -> tuple[Tensor, Tensor]:
        return self._heads_of_latent(self.kv_up(latent), rotary_SBR, cos_sin)

    def _heads_of_latent(self, kv_SBF: Tensor, rotary_SBR: Tensor, cos_sin: RopeCosSin | None) -> tuple[Tensor, Tensor]:
        spec = self.spec
        kv = kv_SBF.unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        rotary_SBR = self.rotary_key_comm(rotary_SBR)
        if cos_sin is None:
            return _join_shared_key(kv, rotary_SBR, nope_dim=spec.nope_dim)
        return join_rope_key(kv, rotary_SBR, cos_sin, nope_dim=spec.nope_dim, kernels=self.head_kernels)


def _join_shared_key(kv_SBHM: Tensor, shared_SBR: Tensor, *, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Returns new keys, each joined to the part that all heads of its token share, and new values: attention saves no view of `kv`."""
    keys, values = kv_SBHM.split((nope_dim, kv_SBHM.shape[-1] - nope_dim), dim=-1)
    shared = shared_SBR.unsqueeze(-2).expand(*keys.shape[:-1], -1)
    return torch.cat((keys, shared), dim=-1), values.contiguous()


def _normed(norm: Norm | None, latent: Tensor) -> Tensor | RecomputableOutput:
    return latent if norm is None else norm.add_and_norm(latent)[1]


class LatentHeadKernels(Protocol):
    """See `kernels/attention/latent_heads.py`."""

    interleaved_rope: Callable[..., Tensor]
    interleaved_rope_backward: Callable[..., Tensor]
    join_rope_key: Callable[..., TensorPair]
    join_rope_key_backward: Callable[..., TensorPair]


class _RopeOp(AutogradOp):
    """Called with a kernel, its derivative, cosines and sines, which alone are saved, and what is rotated by them.

    The derivative returns a tuple.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], derivative: Callable[..., Any], *tensors: Tensor) -> Any:
        cos, sin, *inputs = tensors
        ctx.save_for_backward(cos, sin)
        ctx.derivative = derivative
        return kernel(*inputs, cos, sin)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.derivative(*grads, *ctx.saved_tensors)


def interleaved_rope(
    x_SBHE: Tensor, rope_cos_sin: RopeCosSin, *, scale: float = 1.0, kernels: LatentHeadKernels
) -> Tensor:
    """Returns new heads times `scale`, with their rotary parts rotated."""
    rotate = partial(kernels.interleaved_rope, scale=scale)
    if not torch.is_grad_enabled():
        return rotate(x_SBHE, *rope_cos_sin)

    def derivative(*tensors: Tensor) -> tuple[Tensor]:
        return (kernels.interleaved_rope_backward(*tensors, scale=scale),)

    return _RopeOp.apply(rotate, derivative, *rope_cos_sin, x_SBHE)  # pyright: ignore[reportReturnType]


def join_rope_key(
    kv_SBHM: Tensor, rotary_SBR: Tensor, rope_cos_sin: RopeCosSin, *, nope_dim: int, kernels: LatentHeadKernels
) -> TensorPair:
    """Returns new keys, each joined to the rotated rotary key of its token, and values."""
    join = partial(kernels.join_rope_key, nope_dim=nope_dim)
    if not torch.is_grad_enabled():
        return join(kv_SBHM, rotary_SBR, *rope_cos_sin)
    return _RopeOp.apply(join, kernels.join_rope_key_backward, *rope_cos_sin, kv_SBHM, rotary_SBR)  # pyright: ignore[reportReturnType]
