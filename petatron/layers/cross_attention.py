"""Cross-attention: the queries of a decoder's tokens over the keys and values of what an encoder made of another sequence.

While text is generated, a sequence has the keys and values of its encoded text in its slot: they are written once, before its first token
(`CrossAttention.store`), and every step reads them.

S sequence of the queries, T sequence of the keys, B batch, D hidden, H query heads, K kv heads, E head dim; H and K count the heads of
this rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.kernels import rope
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.core_attention import CoreAttention
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.ops.split_qkv_norm_rope import RopeKernels, split_qkv_without_rope
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, SoftmaxAttentionSpec
from petatron.layers.spec.generation_state import GenerationStep, RecurrentState, StateSlots, StateTensor
from petatron.layers.spec.generation_step_groups import group_outputs
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.sharding.shard_spec import Section, Shard

ENCODED = "encoded"
"""The name in `ForwardContext.tensors` of the encoder's output [T, B, D]."""
CROSS = Visibility.cross()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(SoftmaxAttentionSpec):
    """Cross-attention.

    key_length: tokens of the sequence of keys. softmax_scale: the factor on scores; None: 1 / sqrt(head dim).
    qk_norm: the norm of every query and key head.
    """

    name = "cross_attention"
    title = "cross-attention"

    num_kv_heads: int
    head_dim: int
    key_length: int
    qkv_bias: bool
    qk_norm: NormSpec | None = None
    softmax_scale: float | None = None
    output_multiplier: float = 1.0

    can_generate = True

    @property
    def prompt_is_capturable(self) -> bool:
        return False

    def generation_state(self, tp: int) -> RecurrentState:
        shape = (self.key_length, self.kv_dim(tp) // self.head_dim, self.head_dim)
        return RecurrentState(
            (StateTensor("key", shape), StateTensor("value", shape), StateTensor("length", (), wide=True))
        )

    def build(self, layer_index: int) -> CrossAttention:
        return CrossAttention(self, layer_index)

    def params(self) -> Mapping[str, ParamSpec]:
        width, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        of_q = Shard(tp=0, sections=(Section("q", q, self.num_heads),))
        of_kv = Shard(tp=0, sections=tuple(Section(name, kv, self.num_kv_heads) for name in ("k", "v")))
        norm = {} if self.qk_norm is None else self.qk_norm.params(partial_grad="always")
        return (
            with_prefix("q", linear_params(width, q, of_q, bias=self.qkv_bias, std=self.std))
            | with_prefix("kv", linear_params(width, 2 * kv, of_kv, bias=self.qkv_bias, std=self.std))
            | with_prefix("q_norm", norm)
            | with_prefix("k_norm", norm)
            | with_prefix("out", linear_params(q, width, Shard(tp=1), bias=self.out_bias, std=self.out_std))
        )

    def q_dim(self, tp: int) -> int:
        """The width of one rank's queries."""
        return self.num_heads // tp * self.head_dim

    def kv_dim(self, tp: int) -> int:
        """The width of one rank's keys; ranks beyond the number of kv heads have replicas."""
        return max(self.num_kv_heads // tp, 1) * self.head_dim

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Every query meets every key; and the GEMM of keys and values has the tokens of the other sequence."""
        kv_elements = self.hidden_size * 2 * self.kv_dim(1)
        pairs = 12.0 * self.q_dim(1) * seq_length * self.key_length
        return pairs + 6.0 * kv_elements * (self.key_length - seq_length)

    def keys(self, shape: ActivationShape) -> int:
        """Returns the tokens of the other sequence that the GEMM of keys and values sees."""
        return shape.with_length(self.key_length).gathered_tokens

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        inputs, output, log_sum_exp = self.core_saved_bytes(shape)
        saved = inputs + output + (0 if "core_attn" in recomputed else log_sum_exp)
        if self.qk_norm is not None:
            rows, keys, q_dim, kv_dim = self._sizes(shape)
            saved += shape.activation_bytes(rows, q_dim) + shape.activation_bytes(keys, kv_dim)
            heads = (rows * q_dim + keys * kv_dim) // self.head_dim
            saved += self.qk_norm.statistics_bytes(shape, heads)
        keys_shape = shape.with_length(self.key_length)
        saved += shape.fp8_requantized_bytes(self.q_dim(shape.tp)) + shape.fp8_column_input_bytes(self.hidden_size)
        return saved + keys_shape.fp8_column_input_bytes(self.hidden_size)

    def _sizes(self, shape: ActivationShape) -> tuple[int, int, int, int]:
        return shape.gathered_tokens, self.keys(shape), self.q_dim(shape.tp), self.kv_dim(shape.tp)

    def core_saved_bytes(self, shape: ActivationShape) -> tuple[int, int, int]:
        rows, keys, q_dim, kv_dim = self._sizes(shape)
        inputs = shape.activation_bytes(rows, q_dim) + shape.activation_bytes(keys, 2 * kv_dim)
        return inputs, shape.activation_bytes(rows, q_dim), rows * q_dim // self.head_dim * shape.compute_bytes

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        return shape.activation_bytes(self.keys(shape), 2 * self.kv_dim(shape.tp))

    def forward_flops(self, shape: ActivationShape) -> float:
        rows, keys, q_dim, kv_dim = self._sizes(shape)
        projections = 2.0 * self.hidden_size * (rows * q_dim + keys * 2 * kv_dim)
        return self.norm_flops(shape) + projections + self.core_flops(shape) + self.out_flops(shape)

    def core_flops(self, shape: ActivationShape) -> float:
        return 4.0 * shape.gathered_tokens * self.q_dim(shape.tp) * self.key_length

    def out_flops(self, shape: ActivationShape) -> float:
        return 2.0 * shape.gathered_tokens * self.q_dim(shape.tp) * self.hidden_size


class CrossAttention(BranchModule):
    """out(core(q(x), k(encoded), v(encoded))); k and v are one GEMM, stored as two logical tensors."""

    fp8_linears = ("q", "kv", "out")
    input_feeds_one_gemm = True

    def __init__(self, spec: CrossAttentionSpec, layer_index: int) -> None:
        super().__init__()
        self.spec, self.layer_index, self.head_dim = spec, layer_index, spec.head_dim
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = Linear(spec.hidden_size, (q_width,), bias=spec.qkv_bias)
        self.kv = Linear(spec.hidden_size, (kv_width, kv_width), bias=spec.qkv_bias)
        self.q_norm = None if spec.qk_norm is None else spec.qk_norm.build()
        self.k_norm = None if spec.qk_norm is None else spec.qk_norm.build()
        scale = spec.softmax_scale
        self.query_factor = None if scale is None else scale * math.sqrt(spec.head_dim)
        self.core = CoreAttention(dropout=spec.dropout)
        self.kernels: RopeKernels = rope
        self.out = Linear(q_width, (spec.hidden_size,), bias=spec.out_bias)

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "rotary embedding"}

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"core_attn": self.core, "attention": self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        return {"qkv_linear": (self,), "core_attn": (self.core,), "attn_proj": (self.out,)}

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        if context.generation is not None:
            return self._cached_attention(x_SBD, context.generation)
        q_SBHE = self._queries(x_SBD)
        k_TBKE, v_TBKE = self._keys_values(context.tensors[ENCODED])
        visibility = CROSS.of_batch(None, context.key_spans)
        return self.out(self.core(q_SBHE, k_TBKE, v_TBKE, visibility).flatten(-2))

    def store(self, encoded_TBD: Tensor, lengths_B: Tensor, slots_B: Tensor, states: StateSlots) -> None:
        """Writes keys and values of encoded texts, and the numbers of their tokens, to the slots of their sequences."""
        for name, x_TBKE in zip(("key", "value"), self._keys_values(encoded_TBD), strict=True):
            states[name][slots_B, : x_TBKE.shape[0]] = x_TBKE.transpose(0, 1).to(states[name].dtype)
        states["length"][slots_B] = lengths_B.to(states["length"].dtype)

    def _cached_attention(self, x_TD: Tensor | RecomputableOutput, step: GenerationStep) -> Tensor:
        slots, q_THE = step.states[self.layer_index], self._queries(x_TD)
        outputs = [self._attend_to_slots(group.gather(q_THE), slots, group.slots_B) for group in step.groups]
        return self.out(group_outputs(step.groups, outputs, like_T=q_THE).flatten(-2))

    def _attend_to_slots(self, q_SBHE: Tensor, slots: StateSlots, slots_B: Tensor) -> Tensor:
        """Returns the attention [S, B, H, E] of some sequences to the texts in their slots; of an empty one, to its first row."""
        k_BLKE, v_BLKE, lengths_B = (slots[name].index_select(0, slots_B) for name in ("key", "value", "length"))
        visible_BL = torch.arange(k_BLKE.shape[1], device=lengths_B.device) < lengths_B.clamp(min=1)[:, None]
        # The query heads of one kv head are rows of one sequence: nothing is repeated.
        q = q_SBHE.permute(1, 2, 0, 3).unflatten(1, (k_BLKE.shape[2], -1)).flatten(2, 3)
        k, v = k_BLKE.transpose(1, 2), v_BLKE.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_BL[:, None, None])
        return out.unflatten(2, (-1, q_SBHE.shape[0])).flatten(1, 2).permute(2, 0, 1, 3)

    def _queries(self, x: Tensor | RecomputableOutput) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        return q if self.query_factor is None else q * self.query_factor

    def _keys_values(self, encoded_TBD: Tensor) -> tuple[Tensor, Tensor]:
        kv, heads = self.kv(encoded_TBD), self.kv.sections[0] // self.head_dim
        _, k, v = split_qkv_without_rope(kv, num_heads=0, num_kv_heads=heads, kernels=self.kernels)
        return (k if self.k_norm is None else self.k_norm(k)), v
