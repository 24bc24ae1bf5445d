"""Mamba-2 (Dao and Gu, state-space duality): a mixer that scans the sequence with a state of fixed size.

    z | x | B | C | dt  =  W_in u                                   one GEMM
    x | B | C           =  silu(conv(x | B | C))                    causal, each channel over its last tokens
    dt                  =  softplus(dt + dt_bias),  A = -exp(A_log)
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,   y_t = h_t C_t + D x_t
    out                 =  W_out norm(y silu(z))                    or W_out norm(y) silu(z), or W_out y silu(z) (`output_gate.py`)

Factors, where there are some (Falcon-H1), are on z, x, B, C and dt as they leave W_in.

Heads of width P share B and C of width N in groups. The norm is over groups of channels: as many groups as B and C have in Mamba-2's own
code, Megatron and Nemotron-H; all channels in one in `transformers`' Mamba2 and Bamba. Both are `norm_groups`.

Tensor parallelism shares out heads: z, x and dt by head, B and C by group (a group's replicas where there are more ranks than groups),
the convolution, A_log, dt_bias, D and the norm's weight with them, W_out by rows. A norm group that ranks share needs two sums
over them per token, one in each direction (`group_sum_slots`); nothing else is communicated besides what every branch does.

Context parallelism gives each rank one contiguous part. The convolution takes the last tokens of the part before, and the
scan the state after it (`context_parallel_recurrence.py`). Packed documents reset both.

While text is generated, a sequence has the last inputs of its convolution and h: as many bytes after a million tokens as after one.

S sequence, B batch, D hidden, C channels of the convolution, H heads, P head dim, G groups, N state dim; those of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.kernels.attention.document_layout import Documents
from petatron.kernels.ssm import causal_conv as conv_reference
from petatron.kernels.ssm import chunk_scan as scan_reference
from petatron.kernels.ssm.decode import conv_step as conv_step_reference
from petatron.kernels.ssm.decode import scan_step as scan_step_reference
from petatron.kernels.ssm.decode.scan_step import ScanParams
from petatron.kernels.ssm.mamba2_recurrence import decay_rates, step_sizes
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import ContextSlot, SequenceParts
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.generation_state import StateSlots, StateTensor
from petatron.layers.spec.generation_step_groups import SequenceGroup
from petatron.layers.spec.param_spec import ParamSpec, with_prefix
from petatron.layers.ssm.autograd_ops import ConvKernels, ConvStepKernels, ScanInputs, causal_conv
from petatron.layers.ssm.chunked_recurrence import ChunkedRecurrence
from petatron.layers.ssm.context_parallel_recurrence import scan_over_parts
from petatron.layers.ssm.initial_values import LogDecayValues, StepBiasValues
from petatron.layers.ssm.output_gate import OutputGate, build_output_gate
from petatron.layers.ssm.recurrent_branch import ConvolvedBranchSpec, RecurrentBranch
from petatron.sharding.initial_values import ONES, UniformValues
from petatron.sharding.shard_spec import Section, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(ConvolvedBranchSpec):
    """A Mamba-2 mixer.

    num_groups: how many B and C there are; each is for num_heads / num_groups heads.
    norm_groups: in how many groups of channels the gated norm is taken: num_groups, or 1.
    output_gate: in which order the scan's output is normalized and gated.
    multipliers: the factors on z, x, B, C and dt; None: they have none.
    """

    name = "mamba"
    title = "Mamba-2"
    region = "mamba"

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    norm_groups: int
    output_gate: OutputGate = "gate_then_norm"
    multipliers: tuple[float, ...] | None = None

    def recurrence_state(self, tp: int) -> StateTensor:
        return StateTensor("ssm", (self.num_heads // tp, self.head_dim, self.state_dim), wide=True)

    @property
    def inner_size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    def build(self, layer_index: int) -> Mamba2:
        return Mamba2(self, layer_index)

    def sections(self) -> dict[str, tuple[int, int]]:
        inner, states = (self.inner_size, self.num_heads), (self.num_groups * self.state_dim, self.num_groups)
        return {"z": inner, "x": inner, "B": states, "C": states, "dt": (self.num_heads, self.num_heads)}

    def params(self) -> Mapping[str, ParamSpec]:
        channels = tuple(Section(f"conv_{name}", *self.sections()[name]) for name in ("x", "B", "C"))
        bound = self.conv_width**-0.5
        conv = {
            name: ParamSpec(
                shape=(sum(section.rows for section in channels), *width),
                shard=Shard(tp=0, sections=channels),
                init=UniformValues(-bound, bound),
                weight_decay=name == "weight",
            )
            for name, width in (("weight", (1, self.conv_width)), ("bias", ()))
        }
        norm_weight = ParamSpec(shape=(self.inner_size,), shard=Shard(tp=0), init=ONES)
        by_head = {"A_log": LogDecayValues(), "dt_bias": StepBiasValues(), "D": ONES}
        return (
            {name: ParamSpec(shape=(self.num_heads,), shard=Shard(tp=0), init=init) for name, init in by_head.items()}
            | self.in_proj_params()
            | with_prefix("conv", conv)
            | ({} if self.output_gate == "none" else {"norm.weight": norm_weight})
            | self.out_proj_params()
        )

    def conv_channels(self, tp: int) -> int:
        """The channels of one rank's convolution; ranks beyond the number of groups have replicas of B and C."""
        return self.inner_size // tp + 2 * max(self.num_groups // tp, 1) * self.state_dim

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Counts the convolution, and the scan in its chunked form: inside chunks, into the states and out of them."""
        tokens_seen = min(self.chunk_size, seq_length) * (0.5 if causal else 1.0)
        inside = 2 * tokens_seen * (self.num_groups * self.state_dim + self.inner_size)
        states = 4 * self.inner_size * self.state_dim
        conv = 2 * self.conv_width * self.conv_channels(1)
        return 3.0 * seq_length * (inside + states + conv)

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, inner, heads = shape.gathered_tokens, self.inner_size // shape.tp, self.num_heads // shape.tp
        channels = self.conv_channels(shape.tp)
        # The first GEMM's output, the convolution's, the scan's, its norm where a gate follows, and the input of the last GEMM.
        outputs = 3 if self.output_gate == "norm_then_gate" else 2
        saved = shape.activation_bytes(rows, inner + channels + heads + channels + outputs * inner)
        statistics = 0 if self.output_gate == "none" else max(self.norm_groups // shape.tp, 1)
        steps_and_statistics = 2 * heads + statistics
        saved += rows * steps_and_statistics * shape.compute_bytes
        saved += 0 if self.multipliers is None else shape.activation_bytes(1, inner + channels + heads)
        decays = 2 * heads * shape.compute_bytes  # A, and the exponential that it is the negative of
        return saved + decays + shape.fp8_column_input_bytes(self.hidden_size) + shape.fp8_requantized_bytes(inner)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        """The halo of the convolution, and a state with its decay."""
        heads = self.num_heads // shape.tp
        return self.halo_bytes(shape) + shape.batch * heads * (self.head_dim * self.state_dim + 1) * shape.compute_bytes


class CausalConv(nn.Module):
    """silu(convolution) over the last tokens, each channel by itself; of contiguous parts of the sequence, with the end of the part before.

    The weight is [C, 1, W], as `nn.Conv1d` has it, and with it every checkpoint of others.
    """

    context_slots: Mapping[str, ContextSlot] = {"parts": "sequence parts"}

    def __init__(self, channels: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.parts: SequenceParts | None = None
        self.kernels: ConvKernels = conv_reference
        self.step_kernels: ConvStepKernels = conv_step_reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "causal convolution", "step_kernels": "causal convolution step"}

    def forward(self, x_SBC: Tensor, starts_SB: Tensor | None) -> Tensor:
        window = None
        if self.parts is not None:
            window = self.parts.from_previous(window_after(x_SBC, starts_SB, self.weight.shape[-1] - 1))
        return self._convolve(x_SBC, starts_SB, window)

    def after_window(self, x_SBC: Tensor, window: Tensor) -> Tensor:
        """The convolution of tokens after those of a window [W - 1, B, C]."""
        return self._convolve(x_SBC, None, window)

    def step(self, x_BC: Tensor, *, windows: Tensor, slots_B: Tensor) -> Tensor:
        """The convolution of one token of each sequence, which is taken into the window of the sequence's slot."""
        return self.step_kernels.conv_step(x_BC, self.weight.squeeze(1), self.bias, windows=windows, slots_B=slots_B)

    def _convolve(self, x_SBC: Tensor, starts_SB: Tensor | None, window: Tensor | None) -> Tensor:
        weight_CW = self.weight.squeeze(1)
        return causal_conv(x_SBC, weight_CW, self.bias, kernels=self.kernels, starts_SB=starts_SB, window=window)


def window_after(x_SBC: Tensor, starts_SB: Tensor | None, length: int) -> Tensor:
    """Returns the last tokens, which the convolution of the next ones sees; those of a document that has ended are zero."""
    window = x_SBC[-length:]
    if starts_SB is None:
        return window
    begun = starts_SB[-length:].cumsum(dim=0)
    return window.masked_fill((begun != begun[-1])[..., None], 0.0)


class SelectiveScan(ChunkedRecurrence):
    """The scan of this rank's heads."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__(chunk_size, operation="selective scan", kernels=scan_reference, over_parts=scan_over_parts)


class Mamba2(RecurrentBranch):
    """out_proj(norm(scan(conv(x | B | C)), z)); z, x, B, C and dt are one GEMM, stored as five logical tensors."""

    step_operation = "selective scan step"

    def __init__(self, spec: Mamba2Spec, layer_index: int) -> None:
        super().__init__(spec, layer_index, step_kernels=scan_step_reference)
        self.spec = spec
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(spec.num_heads)) for _ in range(3))
        self.conv = CausalConv(spec.conv_channels(1), spec.conv_width)
        self.scan = SelectiveScan(spec.chunk_size)
        self.norm = build_output_gate(spec.output_gate, spec.inner_size, num_groups=spec.norm_groups, eps=spec.norm_eps)
        self.out_proj = Linear(spec.inner_size, (spec.hidden_size,), bias=False)

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        z_SBC, channels_SBC, dt_SBH = self._project(x_SBD)
        if context.generation is not None:
            y_TC = self.generated_outputs(context.generation, channels_SBC, dt_SBH, like_T=z_SBC)
            return self.out_proj(self.norm(y_TC, z_SBC))
        starts_SB = document_starts(context.documents, self.parts)
        y_SBHP = self.scan(self._scan_inputs(self.conv(channels_SBC, starts_SB), dt_SBH), starts_SB)
        return self.out_proj(self.norm(y_SBHP.flatten(-2), z_SBC))

    def advance(self, group: SequenceGroup, slots: StateSlots, channels_TC: Tensor, dt_TH: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if group.decodes:
            return self._decode(group, channels_TC, dt_TH, slots)
        channels_SBC, window = group.gather(channels_TC), group.read(slots["conv"]).transpose(0, 1)
        inputs = self._scan_inputs(self.conv.after_window(channels_SBC, window), group.gather(dt_TH))
        group.write(slots["conv"], group.last_tokens(window, channels_SBC).transpose(0, 1))
        # Padding neither decays a state nor adds to it.
        inputs = inputs._replace(dt_SBH=group.zero_padding(inputs.dt_SBH))
        y_SBHP, state = self.scan.after_state(inputs, group.read(slots["ssm"]))
        group.write(slots["ssm"], state)
        return y_SBHP.flatten(-2)

    def _decode(self, group: SequenceGroup, channels_TC: Tensor, dt_TH: Tensor, slots: StateSlots) -> Tensor:
        """Takes one token of each sequence into its state, in place, and returns the recurrence's outputs [1, B, C]."""
        [channels_BC], [dt_BH] = group.gather(channels_TC), group.gather(dt_TH)
        x, B, C = self._split_channels(self.conv.step(channels_BC, windows=slots["conv"], slots_B=group.slots_B))
        heads = ScanParams(self.A_log, self.dt_bias, self.D)
        y = self.step_kernels.scan_step(x, dt_BH, B, C, heads, states=slots["ssm"], slots_B=group.slots_B)
        return y.flatten(-2).unsqueeze(0)

    def _project(self, x: Tensor | RecomputableOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Returns z, the channels of the convolution and dt."""
        z, x_rows, B, C, dt = self.in_proj.sections
        projected = self.in_proj(x)
        if self.spec.multipliers is not None:
            sections = zip(self.in_proj.sections, self.spec.multipliers, strict=True)
            projected = projected * torch.cat([projected.new_full((rows,), factor) for rows, factor in sections])
        z_part, channels, dt_part = projected.split((z, x_rows + B + C, dt), dim=-1)
        return z_part, channels, dt_part

    def _scan_inputs(self, channels: Tensor, dt: Tensor) -> ScanInputs:
        x, B, C = self._split_channels(channels)
        return ScanInputs(x, step_sizes(dt, self.dt_bias), decay_rates(self.A_log), B, C, self.D)

    def _split_channels(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x by heads, and B and C by groups."""
        _, x_rows, B_rows, C_rows, _ = self.in_proj.sections
        x, B, C = channels.split((x_rows, B_rows, C_rows), dim=-1)
        width, state_dim = self.spec.head_dim, self.spec.state_dim
        return x.unflatten(-1, (-1, width)), B.unflatten(-1, (-1, state_dim)), C.unflatten(-1, (-1, state_dim))


def document_starts(documents: Documents | None, parts: SequenceParts | None) -> Tensor | None:
    """Returns whether each token of a rank's part of the sequence begins a document [S, B]; None: there are no documents."""
    if documents is None:
        return None
    starts_SB = documents.starts_BS.t()
    positions = torch.arange(starts_SB.shape[0], device=starts_SB.device)
    begins_SB = starts_SB == positions[:, None]
    return begins_SB if parts is None else parts.local(begins_SB)
