"""The gated delta net (Yang, Kautz and Hatamizadeh): a mixer whose state of fixed size is a memory of values under keys.

    q | k | v | z | b | a  =  W_in u                                one GEMM
    q | k | v              =  silu(conv(q | k | v))                 causal, each channel over its last tokens
    g                      =  -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T,   o_t = S_t^T q_t
    out                    =  W_out (norm(o) silu(z))

Queries and keys have length 1 (`kernels/ssm/delta_recurrence.py`). Key heads are for num_value_heads / num_key_heads value heads each.
The norm is over the channels of a value head, with one weight for all heads.

Tensor parallelism shares out heads: v, z, b and a by value head, q and k by key head (a key head's replicas where there are more ranks
than key heads), the convolution, A_log and dt_bias with them, W_out by rows.

Context parallelism gives each rank one contiguous part: the convolution takes the last tokens of the part before, and the
delta rule the state after it (`context_parallel_recurrence.py`). Packed documents reset both.

S sequence, B batch, D hidden, C channels of the convolution, H value heads, P value head dim, G key heads, N key head dim; those of
this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from petatron.kernels.ssm import chunk_delta_rule as delta_reference
from petatron.kernels.ssm import output_gate as norm_reference
from petatron.kernels.ssm.decode import delta_step as step_reference
from petatron.kernels.ssm.decode.delta_step import DeltaGateInputs
from petatron.kernels.ssm.delta_recurrence import delta_gates
from petatron.kernels.ssm.output_gate import NormGate
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.generation_state import StateSlots, StateTensor
from petatron.layers.spec.generation_step_groups import SequenceGroup
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.ssm.autograd_ops import DeltaInputs, NormThenGateKernels, norm_then_gate
from petatron.layers.ssm.chunked_recurrence import ChunkedRecurrence
from petatron.layers.ssm.context_parallel_recurrence import delta_rule_over_parts
from petatron.layers.ssm.initial_values import LogDecayValues
from petatron.layers.ssm.mamba2 import CausalConv, document_starts
from petatron.layers.ssm.recurrent_branch import ConvolvedBranchSpec, RecurrentBranch
from petatron.sharding.initial_values import ONES, NormalValues
from petatron.sharding.shard_spec import Section, Shard

LOWEST_DECAY = 0.01
"""Of exp(A_log) initially: 0 would have no logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetSpec(ConvolvedBranchSpec):
    """A gated delta net.

    num_key_heads: how many queries and keys there are; each is for num_value_heads / num_key_heads value heads.
    """

    name = "delta"
    title = "gated delta net"
    region = "delta"
    weights_formula = "h (2 n + 3 p + 2 H)"
    mixing_formula = "{c} (2 n + 2 p + H N) + 6 H N P + 2 w (2 n + p)"

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    def recurrence_state(self, tp: int) -> StateTensor:
        sizes = (self.num_value_heads // tp, self.key_head_dim, self.value_head_dim)
        return StateTensor("delta", sizes, wide=True)

    @property
    def inner_size(self) -> int:
        """The width of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def product_size(self) -> int:
        """The width over which tokens of a chunk meet: that of all key heads, whose products their value heads share."""
        return self.num_key_heads * self.key_head_dim

    def build(self, layer_index: int) -> GatedDeltaNet:
        return GatedDeltaNet(self, layer_index)

    def sections(self) -> dict[str, tuple[int, int]]:
        keys = self.num_key_heads * self.key_head_dim, self.num_key_heads
        values, heads = (self.inner_size, self.num_value_heads), (self.num_value_heads, self.num_value_heads)
        return {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}

    def params(self) -> Mapping[str, ParamSpec]:
        channels = tuple(Section(f"conv_{name}", *self.sections()[name]) for name in ("q", "k", "v"))
        conv = ParamSpec(
            shape=(sum(section.rows for section in channels), 1, self.conv_width),
            shard=Shard(tp=0, sections=channels),
            init=NormalValues(self.std),
            weight_decay=True,
        )
        by_head, one_for_all_heads = Shard(tp=0), Shard(partial_grad="always")
        return {
            "A_log": ParamSpec(shape=(self.num_value_heads,), shard=by_head, init=LogDecayValues(low=LOWEST_DECAY)),
            "dt_bias": ParamSpec(shape=(self.num_value_heads,), shard=by_head, init=ONES),
            **self.in_proj_params(),
            "conv.weight": conv,
            "norm.weight": ParamSpec(shape=(self.value_head_dim,), shard=one_for_all_heads, init=ONES),
            **self.out_proj_params(),
        }

    def conv_channels(self, tp: int) -> int:
        """The channels of one rank's convolution; ranks beyond the number of key heads have replicas of q and k."""
        return self.inner_size // tp + 2 * max(self.num_key_heads // tp, 1) * self.key_head_dim

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Counts the convolution and the chunked delta rule: intra-chunk, the triangular solve for U and W, and inter-chunk.

        Intra-chunk are k k^T and q k^T (of a key head), and A v_new; the solve has half a chunk for each token of U and W. Inter-chunk
        are W S, q S and k^T v_new.
        """
        tokens_seen = min(self.chunk_size, seq_length) * (0.5 if causal else 1.0)
        states = self.num_value_heads * self.key_head_dim
        intra_chunk = 2 * tokens_seen * (2 * self.product_size + self.inner_size)
        solve = 2 * tokens_seen * (self.inner_size + states)
        inter_chunk = 6 * states * self.value_head_dim
        conv = 2 * self.conv_width * self.conv_channels(1)
        return 3.0 * seq_length * (intra_chunk + solve + inter_chunk + conv)

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, values, heads = shape.gathered_tokens, self.inner_size // shape.tp, self.num_value_heads // shape.tp
        channels = self.conv_channels(shape.tp)
        # The first GEMM's output, the convolution's, the delta rule's, and the input of the last GEMM.
        saved = shape.activation_bytes(rows, channels + values + 2 * heads + channels + 2 * values)
        saved += rows * 4 * heads * shape.compute_bytes  # beta, a with its bias, softplus of it, g
        decays = 2 * heads * shape.compute_bytes  # the exponential of A_log, and its negative
        return saved + decays + shape.fp8_column_input_bytes(self.hidden_size) + shape.fp8_requantized_bytes(values)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        """The halo of the convolution, and a state with the matrix that a part multiplies a state with."""
        heads, keys = self.num_value_heads // shape.tp, self.key_head_dim
        return self.halo_bytes(shape) + shape.batch * heads * keys * (self.value_head_dim + keys) * shape.compute_bytes


class DeltaRule(ChunkedRecurrence):
    """The gated delta rule of this rank's heads; kernels of one `operation` do not take the decays of another."""

    def __init__(self, chunk_size: int, *, operation: str = "gated delta rule", kernels: Any = delta_reference) -> None:
        super().__init__(chunk_size, operation=operation, kernels=kernels, over_parts=delta_rule_over_parts)


class HeadNormThenGate(nn.Module):
    """norm(o) silu(z), or sigmoid(z), over the channels of each head, with one weight for all heads."""

    def __init__(self, width: int, *, eps: float, gate: NormGate = "silu") -> None:
        super().__init__()
        self.eps = eps
        self.gate: NormGate = gate
        self.weight = nn.Parameter(torch.empty(width))
        self.kernels: NormThenGateKernels = norm_reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "norm, then gate"}

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        return norm_then_gate(o, z, self.weight, eps=self.eps, gate=self.gate, kernels=self.kernels)


class GatedDeltaNet(RecurrentBranch):
    """out_proj(norm(delta(conv(q | k | v))) silu(z)); all inputs are one GEMM, stored as six logical tensors."""

    step_operation = "gated delta rule step"

    def __init__(self, spec: GatedDeltaNetSpec, layer_index: int) -> None:
        super().__init__(spec, layer_index, step_kernels=step_reference)
        self.spec = spec
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(spec.num_value_heads)) for _ in range(2))
        self.conv = CausalConv(spec.conv_channels(1), spec.conv_width, bias=False)
        self.delta = DeltaRule(spec.chunk_size)
        self.norm = HeadNormThenGate(spec.value_head_dim, eps=spec.norm_eps)
        self.out_proj = Linear(spec.inner_size, (spec.hidden_size,), bias=False)

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        channels_SBC, z_SBHP, b_SBH, a_SBH = self._project(x_SBD)
        if context.generation is not None:
            o_THP = self.generated_outputs(context.generation, channels_SBC, b_SBH, a_SBH, like_T=z_SBHP)
            return self.out_proj(self.norm(o_THP, z_SBHP).flatten(-2))
        starts_SB = document_starts(context.documents, self.parts)
        o_SBHP = self.delta(self._delta_inputs(self.conv(channels_SBC, starts_SB), b_SBH, a_SBH), starts_SB)
        return self.out_proj(self.norm(o_SBHP, z_SBHP).flatten(-2))

    def advance(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, group: SequenceGroup, slots: StateSlots, channels_TC: Tensor, b_TH: Tensor, a_TH: Tensor
    ) -> Tensor:
        if group.decodes:
            return self._decode(group, channels_TC, b_TH, a_TH, slots)
        channels_SBC, window = group.gather(channels_TC), group.read(slots["conv"]).transpose(0, 1)
        convolved = self.conv.after_window(channels_SBC, window)
        inputs = self._delta_inputs(convolved, group.gather(b_TH), group.gather(a_TH))
        group.write(slots["conv"], group.last_tokens(window, channels_SBC).transpose(0, 1))
        # Padding neither decays a state nor writes to it.
        g, beta = group.zero_padding(inputs.g), group.zero_padding(inputs.beta_SBH)
        state = group.read(slots["delta"])
        o_SBHP, state = self.delta.after_state(inputs._replace(g=g, beta_SBH=beta), state)
        group.write(slots["delta"], state)
        return o_SBHP

    def _decode(
        self, group: SequenceGroup, channels_TC: Tensor, b_TH: Tensor, a_TH: Tensor, slots: StateSlots
    ) -> Tensor:
        """Takes one token of each sequence into its state, in place, and returns the delta rule's outputs [1, B, H, P]."""
        [channels_BC], [b_BH], [a_BH] = (group.gather(x_T) for x_T in (channels_TC, b_TH, a_TH))
        q, k, v = self._split_channels(self.conv.step(channels_BC, windows=slots["conv"], slots_B=group.slots_B))
        gates = DeltaGateInputs(b_BH, a_BH, *self._decay_params())
        return self.step_kernels.delta_step(q, k, v, gates, states=slots["delta"], slots_B=group.slots_B).unsqueeze(0)

    def _project(self, x: Tensor | RecomputableOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the channels of the convolution, z, b and a."""
        q, k, v, z, b, a = self.in_proj.sections
        channels, z_part, b_part, a_part = self.in_proj(x).split((q + k + v, z, b, a), dim=-1)
        return channels, z_part.unflatten(-1, (-1, self.spec.value_head_dim)), b_part, a_part

    def _delta_inputs(self, channels: Tensor, b: Tensor, a: Tensor) -> DeltaInputs:
        return DeltaInputs(*self._split_channels(channels), *delta_gates(b, a, *self._decay_params()))

    def _decay_params(self) -> tuple[Tensor, Tensor]:
        """Returns A_log of each head, and the bias of a, in the shape that a has of a token."""
        return self.A_log, self.dt_bias

    def _split_channels(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys by key heads, and values by value heads."""
        q, k, v = channels.split(self.in_proj.sections[:3], dim=-1)
        keys, values = self.spec.key_head_dim, self.spec.value_head_dim
        return q.unflatten(-1, (-1, keys)), k.unflatten(-1, (-1, keys)), v.unflatten(-1, (-1, values))
