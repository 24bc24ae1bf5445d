"""Multi-head, grouped-query and multi-query self-attention: one layer; the number of kv heads makes the difference.

S sequence, B batch, D hidden, H query heads, K kv heads, E head dim; H and K count the heads of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from petatron.kernels import qk_norm_rope, rope
from petatron.kernels.attention import paged_attention
from petatron.kernels.attention.paged_attention import KeyValue, PagedAttentionKernels, PagedAttentionOp
from petatron.kernels.attention.score_modifiers import NO_RULES, ScoreRules
from petatron.kernels.rope import apply_rope
from petatron.layers.alibi_and_temperature import ALIBI_CHANNELS, AlibiBias, AttentionTemperature, l2_norm
from petatron.layers.core_attention import AttentionSinks, CoreAttention
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec, NormWeights, ProjectionRMSNorm, RMSNorm
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.ops.split_qkv_norm_rope import (
    QKNormRopeKernels,
    QKNorms,
    RopeKernels,
    merge_heads,
    split_qkv_norm_rope,
    split_qkv_rope,
    split_qkv_without_rope,
)
from petatron.layers.relative_position_bias import RELATIVE_BIAS
from petatron.layers.rope import pairs_apart
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, SoftmaxAttentionSpec
from petatron.layers.spec.generation_state import GenerationStep, PagedState
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.layers.token_rows import is_batch_first
from petatron.sharding.shard_spec import Section, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(SoftmaxAttentionSpec):
    """Self-attention.

    visibility: its bias may be ALiBi's (`alibi_and_temperature.py`), or that of relative positions (`relative_position_bias.py`).
    qk_norm: the norm of every query and key head, or, by `qk_norm_scope`, of all of them together.
    rope_interleaved: pairs of channels that rope rotates are neighbors instead of half a head apart.
    temperature: see `alibi_and_temperature.py`. qk_l2_norm: the epsilon of a norm of heads without weights.
    qkv_clip: the largest size of what the first GEMM gives for queries, keys and values; None: it has none.
    softmax_scale: the factor on scores; None: 1 / sqrt(head dim).
    softcap: the bound of scores (`kernels/attention/score_modifiers.py`); None: they have none.
    sinks: whether every head may attend to nothing, with a learned score or with the score 0.
    output_gate: whether the output's channels are multiplied by sigmoids, for which the first GEMM has one more row per channel.
    """

    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: NormSpec | None
    qk_norm_scope: Literal["head", "projection"] = "head"
    rope_interleaved: bool = False
    qkv_clip: float | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: Literal["learned", "zero"] | None = None
    temperature: AttentionTemperature | None = None
    qk_l2_norm: float | None = None
    output_gate: bool = False
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        assert self.visibility.kind != "cross", "self-attention has no keys of another sequence"
        assert not self.alibi or self.visibility.is_causal, (
            "ALiBi's biases of both directions are no product of channels"
        )

    @property
    def alibi(self) -> bool:
        return self.visibility.bias == "alibi"

    @property
    def has_relative_bias(self) -> bool:
        return self.visibility.bias == "relative"

    @property
    def can_generate(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.visibility.is_causal

    @property
    def decode_is_capturable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the kernels of pages lack is computed in plain PyTorch, which reads lengths."""
        ruled = self.softcap is not None or self.sinks is not None or self.visibility.bias is not None
        return paged_attention.VISIBILITY.includes(self.visibility, score_rules=ruled)

    @property
    def needs_positions(self) -> bool:
        """Whether it needs the positions of tokens besides rope's cos and sin."""
        return self.alibi or self.temperature is not None

    def batch_dependence(self) -> str | None:
        variants = {
            "score biases": self.visibility.bias is not None,
            "chunked attention": self.visibility.chunk is not None,
            "attention to first tokens": bool(self.visibility.first_k),
            "attention to later tokens": not self.visibility.is_causal or self.visibility.kind != "causal",
            "capped scores": self.softcap is not None,
            "attention sinks": self.sinks is not None,
            "norms of queries and keys over all heads": self.qk_norm_scope != "head",
            "norms of queries and keys without weights": self.qk_l2_norm is not None,
            "temperature by position": self.temperature is not None,
            "a gated attention output": self.output_gate,
            "positions beyond an original context": self.rope is not None and self.rope.scaling == "longrope",
            "dropout of attention": self.dropout > 0.0,
        }
        return next((name for name, has in variants.items() if has), None)

    def generation_state(self, tp: int) -> PagedState | None:
        if not self.can_generate:
            return None
        heads = self.kv_dim(tp) // self.head_dim
        key_width = self.head_dim + (ALIBI_CHANNELS if self.alibi else 0)
        return PagedState((("key", (heads, key_width)), ("value", (heads, self.head_dim))))

    def build(self, layer_index: int) -> Attention:
        return Attention(self, layer_index)

    def params(self) -> Mapping[str, ParamSpec]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sections = (Section("q", q, self.num_heads), *(Section(name, kv, self.num_kv_heads) for name in ("k", "v")))
        sections += (Section("gate", q, self.num_heads),) if self.output_gate else ()
        rows = sum(section.rows for section in sections)
        qkv = linear_params(self.hidden_size, rows, Shard(tp=0, sections=sections), bias=self.qkv_bias, std=self.std)
        sinks = ParamSpec(shape=(self.num_heads,), shard=Shard(tp=0))
        out = linear_params(q, self.hidden_size, Shard(tp=1), bias=self.out_bias, std=self.out_std)
        return (
            with_prefix("qkv", qkv)
            | with_prefix("q_norm", self._qk_norm_params(self.num_heads))
            | with_prefix("k_norm", self._qk_norm_params(self.num_kv_heads))
            | with_prefix("sinks", {"weight": sinks} if self.sinks == "learned" else {})
            | with_prefix("out", out)
        )

    def _qk_norm_params(self, heads: int) -> dict[str, ParamSpec]:
        if self.qk_norm is None:
            return {}
        if self.qk_norm_scope == "head":
            return self.qk_norm.params(partial_grad="always")
        width = heads * self.head_dim
        shard = Shard(tp=0, sections=(Section("", width, heads),))
        return {name: replace(param, shape=(width,), shard=shard) for name, param in self.qk_norm.params().items()}

    def build_qk_norm(self, heads: int) -> NormWeights | None:
        """Builds the norm of queries or of keys, given the number of their heads."""
        if self.qk_norm is None or self.qk_norm_scope == "head":
            return None if self.qk_norm is None else self.qk_norm.build()
        gamma = self.qk_norm.zero_centered_gamma
        return ProjectionRMSNorm(heads * self.head_dim, eps=self.qk_norm.eps, zero_centered_gamma=gamma)

    def q_dim(self, tp: int) -> int:
        """The width of one rank's queries."""
        return self.num_heads // tp * self.head_dim

    def gate_dim(self, tp: int) -> int:
        """The width of one rank's gates of the output."""
        return self.q_dim(tp) if self.output_gate else 0

    def kv_dim(self, tp: int) -> int:
        """The width of one rank's keys; ranks beyond the number of kv heads have replicas."""
        return max(self.num_kv_heads // tp, 1) * self.head_dim

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        window, chunk = self.visibility.window, self.visibility.chunk
        if self.visibility.kind == "full":
            return 12.0 * self.num_heads * self.head_dim * self._seen_on_both_sides(seq_length) * seq_length
        visible = min(window or seq_length, chunk or seq_length, seq_length)
        if chunk is not None and causal:
            return 6 * self.num_heads * self.head_dim * visible * seq_length
        pairs = visible * seq_length - visible * visible / 2 if causal else float(seq_length * seq_length)
        return 12 * self.num_heads * self.head_dim * pairs

    def _seen_on_both_sides(self, seq_length: int) -> int:
        """The tokens that one sees in full attention, at most."""
        window, chunk = self.visibility.window, self.visibility.chunk
        return min(seq_length if window is None else 2 * window - 1, chunk or seq_length, seq_length)

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, q_dim, kv_dim = shape.gathered_tokens, self.q_dim(shape.tp), self.kv_dim(shape.tp)
        saved = shape.activation_bytes(rows, q_dim + 2 * kv_dim)
        if self.qk_norm is not None:
            saved += shape.activation_bytes(rows, q_dim + kv_dim)
            per_head = self.qk_norm_scope == "head"
            fused = self.qk_norm.kind == "RMSNorm" and self.rope is not None and per_head
            heads = rows * (q_dim + kv_dim) // self.head_dim if per_head else 2 * rows
            saved += 0 if fused else self.qk_norm.statistics_bytes(shape, heads)
        saved += self._saved_variant_bytes(shape)
        saved += shape.activation_bytes(rows, q_dim) + shape.fp8_requantized_bytes(q_dim)
        saved += shape.fp8_column_input_bytes(self.hidden_size)
        saved += shape.activation_bytes(rows, self._saved_gates() * self.gate_dim(shape.tp))
        log_sum_exp = rows * q_dim // self.head_dim * shape.compute_bytes
        return saved + (0 if "core_attn" in recomputed else log_sum_exp)

    def core_saved_bytes(self, shape: ActivationShape) -> tuple[int, int, int]:
        """Before core attention the first GEMM's output, of which values are a view, is saved by qk-norm or a bound."""
        rows, q_dim, kv_dim = shape.gathered_tokens, self.q_dim(shape.tp), self.kv_dim(shape.tp)
        both = shape.activation_bytes(rows, q_dim + kv_dim)
        inputs = both if self.qk_norm is not None else both + shape.activation_bytes(rows, kv_dim)
        if self.rope is not None and self.rope_interleaved and self.qk_norm is None:
            inputs += both
        if self.temperature is not None:
            inputs += shape.activation_bytes(rows, q_dim)
        inputs += self._scaled_query_bytes(shape)
        if self.alibi:
            inputs += both + shape.activation_bytes(rows, (q_dim + kv_dim) // self.head_dim * ALIBI_CHANNELS)
        return inputs, shape.activation_bytes(rows, q_dim), rows * q_dim // self.head_dim * shape.compute_bytes

    @property
    def core_output_feeds_gemm(self) -> bool:
        return not self.output_gate

    def out_saved_bytes(self, shape: ActivationShape) -> int:
        gated = shape.activation_bytes(shape.gathered_tokens, self.gate_dim(shape.tp))
        return gated + shape.fp8_requantized_bytes(self.q_dim(shape.tp))

    def _saved_variant_bytes(self, shape: ActivationShape) -> int:
        """Queries and keys that are tensors of their own, where values are still a view of the first GEMM's output."""
        rows, q_dim, both = shape.gathered_tokens, self.q_dim(shape.tp), self.q_dim(shape.tp) + self.kv_dim(shape.tp)
        heads = both // self.head_dim
        copied = self.rope is not None and self.rope_interleaved and self.qk_norm is None
        saved = shape.activation_bytes(rows, both) if copied else 0
        saved += self._scaled_query_bytes(shape)
        if self.qk_l2_norm is not None:
            widened = both if shape.compute_bytes > shape.element_bytes else 0
            saved += shape.activation_bytes(rows, both) + rows * (heads + widened) * shape.compute_bytes
        if self.temperature is not None:
            saved += shape.activation_bytes(rows, q_dim) + shape.sequence * shape.compute_bytes
        if self.alibi:
            saved += shape.activation_bytes(rows, both + heads * ALIBI_CHANNELS)
        if self.qkv_clip is not None:
            saved += shape.activation_bytes(rows, q_dim + 2 * self.kv_dim(shape.tp))
        return saved

    def _scaled_query_bytes(self, shape: ActivationShape) -> int:
        """Queries with a factor on scores are a copy; where nothing else made one, keys and values hold the first GEMM's output too."""
        others = (self.rope, self.qk_norm, self.qk_l2_norm, self.temperature)
        if self.softmax_scale is None or self.alibi or any(other is not None for other in others):
            return 0
        return shape.activation_bytes(shape.gathered_tokens, self.q_dim(shape.tp))

    def _saved_gates(self) -> int:
        """Sigmoids, the gated output, and the gates themselves where the first GEMM's output is saved."""
        copied = self.rope is not None and self.qk_norm is None and not self.rope_interleaved
        return 2 if copied and self.qkv_clip is None else 3

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        return shape.activation_bytes(shape.gathered_tokens, 2 * self.kv_dim(shape.tp))

    def forward_flops(self, shape: ActivationShape) -> float:
        width = self.q_dim(shape.tp) + 2 * self.kv_dim(shape.tp) + self.gate_dim(shape.tp)
        qkv = 2.0 * shape.gathered_tokens * self.hidden_size * width
        return self.norm_flops(shape) + qkv + self.core_flops(shape) + self.out_flops(shape)

    def core_flops(self, shape: ActivationShape) -> float:
        window, chunk, length = self.visibility.window, self.visibility.chunk, shape.whole_sequence
        visible = min(window or chunk or length, length)
        if self.visibility.kind == "full":
            visible = 2 * self._seen_on_both_sides(length)
        return 2.0 * shape.gathered_tokens * self.q_dim(shape.tp) * visible

    def out_flops(self, shape: ActivationShape) -> float:
        return 2.0 * shape.gathered_tokens * self.q_dim(shape.tp) * self.hidden_size


class Attention(BranchModule):
    """out(core(q, k, v)); q, k and v are one GEMM, stored as three logical tensors."""

    fp8_linears = ("qkv", "out")
    takes_rows = input_feeds_one_gemm = True

    def __init__(self, spec: AttentionSpec, layer_index: int) -> None:
        super().__init__()
        self.spec, self.layer_index = spec, layer_index
        self.head_dim, self.rope = spec.head_dim, spec.rope
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        gate_width = (q_width,) if spec.output_gate else ()
        self.qkv = Linear(spec.hidden_size, (q_width, kv_width, kv_width, *gate_width), bias=spec.qkv_bias)
        self.q_norm = spec.build_qk_norm(spec.num_heads)
        self.k_norm = spec.build_qk_norm(spec.num_kv_heads)
        self.sinks = AttentionSinks(spec.num_heads) if spec.sinks == "learned" else None
        scale = spec.softmax_scale
        self.query_factor = None if scale is None else scale * math.sqrt(spec.head_dim)
        self.core = CoreAttention(dropout=spec.dropout, softcap=spec.softcap)
        self.alibi = AlibiBias(spec.num_heads) if spec.alibi else None
        self.kernels: RopeKernels = rope
        self.qk_norm_rope_kernels: QKNormRopeKernels = qk_norm_rope
        self.paged_kernels: PagedAttentionKernels = paged_attention
        self.attend_to_pages: PagedAttentionOp = paged_attention.paged_attention
        self.out = Linear(q_width, (spec.hidden_size,), bias=spec.out_bias)

    def kernel_slots(self) -> Mapping[str, str]:
        if self.qk_rms_norms is None:
            return {"kernels": "rotary embedding", "paged_kernels": "paged attention"}
        return {"qk_norm_rope_kernels": "qk-norm and rotary embedding", "paged_kernels": "paged attention"}

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"core_attn": self.core, "attention": self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        return {"qkv_linear": (self,), "core_attn": (self.core,), "attn_proj": (self.out,)}

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        (qkv, gate), rows = self._project(x_SBD), context.token_rows
        y_SBHE = self._attend(qkv, context)
        if rows is not None and gate is None and is_batch_first(y_SBHE) == rows.batch_first:
            return self.out(merge_heads(y_SBHE, rows))
        y_SBD = y_SBHE.flatten(-2)
        if gate is not None:
            y_SBD = y_SBD * (gate if rows is None else rows.unflatten(gate)).sigmoid()
        # The GEMM takes tokens in the order in which attention leaves them.
        return self.out(y_SBD) if rows is None else rows.flatten(self.out(y_SBD))

    def _project(self, x: Tensor | RecomputableOutput) -> tuple[Tensor, Tensor | None]:
        """Returns queries, keys and values, and the gates of the output if it has some."""
        qkv, gate = self.qkv(x), None
        if self.spec.output_gate:
            *widths, gate_width = self.qkv.sections
            qkv, gate = qkv.split((sum(widths), gate_width), dim=-1)
        clip = self.spec.qkv_clip
        return qkv if clip is None else qkv.clamp(-clip, clip), gate

    def _attend(self, qkv: Tensor, context: ForwardContext) -> Tensor:
        if context.generation is not None:
            return self._cached_attention(qkv, context, context.generation)
        q, k, v = self._queries_keys_values(qkv, context)
        visibility = self.spec.visibility
        if context.documents is not None:
            visibility = visibility.of_batch(context.documents)
        if self.spec.sinks is None and not self.spec.has_relative_bias:
            return self.core(q, k, v, visibility)
        sinks_H = None if self.spec.sinks is None else self._sinks_H(q)
        return self.core(q, k, v, visibility, sinks_H, self._bias_HD(context))

    def _bias_HD(self, context: ForwardContext) -> Tensor | None:
        return context.tensors[RELATIVE_BIAS] if self.spec.has_relative_bias else None

    def _sinks_H(self, q_SBHE: Tensor) -> Tensor:
        return q_SBHE.new_zeros(q_SBHE.shape[-2]) if self.sinks is None else self.sinks.weight

    def _cached_attention(self, qkv_TD: Tensor, context: ForwardContext, step: GenerationStep) -> Tensor:
        """Attends to the tokens before through the pages of this layer; heads are split as those of a batch of one."""
        pages = step.pages[self.layer_index]
        q, k, v = self._queries_keys_values(qkv_TD.unsqueeze(1), context)
        sinks_H = None if self.spec.sinks is None else self._sinks_H(q)
        rules = ScoreRules.of(self.spec.softcap, sinks_H, self._bias_HD(context))
        if rules is None and self.spec.alibi:
            rules = NO_RULES  # fused kernels take no keys wider than values
        return self.attend_to_pages(
            q.squeeze(1),
            KeyValue(k.squeeze(1), v.squeeze(1)),
            KeyValue(pages["key"], pages["value"]),
            step.batch,
            visibility=self.spec.visibility,
            kernels=self.paged_kernels,
            rules=rules,
        )

    def _queries_keys_values(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split_qkv(qkv, context)
        if self.spec.qk_l2_norm is not None:
            q, k = (l2_norm(x, self.spec.qk_l2_norm) for x in (q, k))
        if self.spec.temperature is not None:
            q = self.spec.temperature.apply(q, context.token_positions())
        q = q if self.query_factor is None else q * self.query_factor
        if self.alibi is not None:
            q, k = self.alibi.widen(q, k, context.token_positions())
        return q, k, v

    def _split_qkv(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q_width, kv_width = self.qkv.sections[:2]
        heads, groups = q_width // self.head_dim, kv_width // self.head_dim
        cos_sin = None if self.rope is None else context.rope_cos_sin[self.rope]
        fused = not self.spec.rope_interleaved
        if cos_sin is not None and self.q_norm is None and fused:
            return split_qkv_rope(
                qkv, cos_sin, num_heads=heads, num_kv_heads=groups, kernels=self.kernels, rows=context.token_rows
            )
        sizes = {"num_heads": heads, "num_kv_heads": groups}
        if cos_sin is not None and self.qk_rms_norms is not None and fused:
            qkv = qkv if context.token_rows is None else context.token_rows.unflatten(qkv)
            return split_qkv_norm_rope(qkv, cos_sin, self.qk_rms_norms, **sizes, kernels=self.qk_norm_rope_kernels)
        q, k, v = split_qkv_without_rope(qkv, **sizes, kernels=self.kernels, rows=context.token_rows)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None and self.spec.rope_interleaved:
            q, k = (pairs_apart(x, cos_sin[0].shape[-1]) for x in (q, k))
        if cos_sin is not None:
            q, k = apply_rope(q, *cos_sin), apply_rope(k, *cos_sin)
        return q, k, v

    @property
    def qk_rms_norms(self) -> QKNorms | None:
        """Returns q-norm and k-norm if both are RMSNorm, which one kernel fuses with rope; else None."""
        both = isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return (self.q_norm, self.k_norm) if both else None
