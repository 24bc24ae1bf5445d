"""Lightning attention (Qin et al.; the linear mixer of MiniMax-Text-01): linear attention whose heads forget at a fixed rate each.

    q | k | v | z  =  W_in u                                    one GEMM
    q | k | v      =  silu(q | k | v)
    S_t = exp(-r) S_{t-1} + v_t k_t^T,   o_t = S_t q_t
    out            =  W_out (norm(o) sigmoid(z))                the norm is over the channels of all heads

The rates r are ALiBi's slopes, 2^(-8 h / H) for head h = 1 ... H, times a factor that falls from 1 in the first layer to nearly 0 in the
last. They are no parameters.

This is the recurrence of Mamba-2 with x = v, B = k, C = q, dt = 1, A = -r, D = 0 and a group for each head, and runs in its kernels
(`kernels/ssm/mamba2_recurrence.py`). The rows of a state do not meet, so a head of more than 64 value channels is several heads of 64
there, which share the group: the width of heads that the kernels keep in registers.

Tensor parallelism shares out heads; the norm needs two sums over the ranks per token, one in each direction. Context parallelism gives
each rank one contiguous part, and passes states between the parts (`context_parallel_recurrence.py`). Packed documents reset states.

S sequence, B batch, D hidden, C channels of all heads, H heads of the kernels, P their width, G heads, N head dim; those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.decode import scan_step as scan_step_reference
from petatron.kernels.ssm.decode.scan_step import ScanParams
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.layers.parallel_slots import TensorRank, TensorSlot
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.generation_state import StateSlots, StateTensor
from petatron.layers.spec.generation_step_groups import SequenceGroup
from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.ssm.autograd_ops import ScanInputs
from petatron.layers.ssm.mamba2 import SelectiveScan, document_starts
from petatron.layers.ssm.output_gate import GroupedRMSNorm
from petatron.layers.ssm.recurrent_branch import RecurrentBranch, RecurrentBranchSpec
from petatron.sharding.initial_values import ONES
from petatron.sharding.shard_spec import Shard

KERNEL_HEAD_DIM = 64
NORM_EPS = 1e-6
"""Of the norm of its output in every published model, whatever that of the others is."""
_UNIT_STEP = math.log(math.expm1(1.0))
"""softplus of it is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(RecurrentBranchSpec):
    """Lightning attention.

    num_layers: of the model, by which a layer's index becomes its factor on slopes.
    """

    name = "lightning"
    title = "lightning attention"
    region = "attention"
    weights_formula = "5 h p"
    mixing_formula = "2 {c} p + 4 p P"

    num_heads: int
    head_dim: int
    num_layers: int

    def recurrence_state(self, tp: int) -> StateTensor:
        heads = self.num_heads * self.heads_per_group // tp
        return StateTensor("kv", (heads, self.head_dim // self.heads_per_group, self.head_dim), wide=True)

    @property
    def inner_size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def heads_per_group(self) -> int:
        """How many heads of the scan's kernels are one of ours."""
        return 1 if self.head_dim % KERNEL_HEAD_DIM else self.head_dim // KERNEL_HEAD_DIM

    def build(self, layer_index: int) -> LightningAttention:
        return LightningAttention(self, layer_index)

    def slopes(self, layer_index: int) -> list[float]:
        """Returns the rate at which each head of a layer forgets; depths of multi-token prediction have those of the last layer."""
        layer = min(layer_index, self.num_layers - 1)
        factor = 1.0 - layer / (self.num_layers - 1 + 1e-5) + 1e-5
        return [factor * 2.0 ** (-8.0 * (head + 1) / self.num_heads) for head in range(self.num_heads)]

    def sections(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(("q", "k", "v", "z"), (self.inner_size, self.num_heads))

    def params(self) -> Mapping[str, ParamSpec]:
        norm_weight = ParamSpec(shape=(self.inner_size,), shard=Shard(tp=0), init=ONES)
        return self.in_proj_params() | {"norm.weight": norm_weight} | self.out_proj_params()

    def mixing_flops(self, seq_length: int, *, causal: bool) -> float:
        """Counts the scan in its chunked form: inside chunks, into the states and out of them."""
        tokens_seen = min(self.chunk_size, seq_length) * (0.5 if causal else 1.0)
        return 3.0 * seq_length * self.inner_size * (4 * tokens_seen + 4 * self.head_dim)

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        rows, inner = shape.gathered_tokens, self.inner_size // shape.tp
        # The first GEMM's output, silu of q, k and v, the scan's output, its norm, the sigmoids, and the input of the last GEMM.
        saved = shape.activation_bytes(rows, (4 + 3 + 1 + 1 + 1 + 1) * inner)
        saved += rows * shape.compute_bytes  # 1 / rms
        return saved + shape.fp8_column_input_bytes(self.hidden_size) + shape.fp8_requantized_bytes(inner)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        """A state with its decays."""
        heads, head_dim, state_dim = self.recurrence_state(shape.tp).shape
        return shape.batch * heads * (head_dim * state_dim + 1) * shape.compute_bytes


class _FixedHeads(NamedTuple):
    """What the kernels of Mamba-2 take of each head of this rank: `decode` becomes `A_H` and a step size of 1 in a step of decoding."""

    A_H: Tensor
    step: Tensor
    decode: ScanParams

    @classmethod
    def build(cls, slopes: list[float], dtype: torch.dtype, device: torch.device) -> _FixedHeads:
        rates = torch.tensor(slopes, dtype=torch.float64, device="cpu")
        steps, skips = torch.full_like(rates, _UNIT_STEP), torch.zeros_like(rates)
        tensors = (-rates, torch.ones_like(rates[:1]), rates.log(), steps, skips)
        A, step, *decode = (x.to(device, dtype) for x in tensors)
        return cls(A, step, ScanParams(*decode))


class LightningAttention(RecurrentBranch):
    """out_proj(norm(scan(silu(q | k | v))) sigmoid(z)); q, k, v and z are one GEMM, stored as four logical tensors."""

    step_operation = "selective scan step"
    tensor_slots: Mapping[str, TensorSlot] = {"tensor_rank": "tensor rank"}

    def __init__(self, spec: LightningSpec, layer_index: int) -> None:
        super().__init__(spec, layer_index, step_kernels=scan_step_reference)
        self.spec = spec
        self.scan = SelectiveScan(spec.chunk_size)
        self.norm = GroupedRMSNorm(spec.inner_size, num_groups=1, eps=NORM_EPS)
        self.out_proj = Linear(spec.inner_size, (spec.hidden_size,), bias=False)
        self.tensor_rank: TensorRank = (0, 1)
        self._heads_for: tuple[TensorRank, torch.device, torch.dtype] | None = None
        self._heads = self._fixed_heads(torch.empty(0, dtype=torch.float32, device="cpu"))

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        qkv_SBC, z_SBC = self._project(x_SBD)
        if context.generation is not None:
            return self._gated_output(self.generated_outputs(context.generation, qkv_SBC, like_T=z_SBC), z_SBC)
        starts_SB = document_starts(context.documents, self.parts)
        return self._gated_output(self.scan(self._scan_inputs(qkv_SBC), starts_SB).flatten(-2), z_SBC)

    def advance(self, group: SequenceGroup, slots: StateSlots, qkv_TC: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        states = slots["kv"]
        if group.decodes:
            [qkv_BC] = group.gather(qkv_TC)
            x_BHP, B_BGN, C_BGN = self._split_heads(qkv_BC)
            dt_BH = x_BHP.new_zeros(x_BHP.shape[:2])
            heads = self._fixed_heads(x_BHP).decode
            y = self.step_kernels.scan_step(x_BHP, dt_BH, B_BGN, C_BGN, heads, states=states, slots_B=group.slots_B)
            return y.flatten(-2).unsqueeze(0)
        inputs = self._scan_inputs(group.gather(qkv_TC))
        # Padding neither decays a state nor adds to it.
        inputs = inputs._replace(dt_SBH=group.zero_padding(inputs.dt_SBH))
        y_SBHP, state = self.scan.after_state(inputs, group.read(states))
        group.write(states, state)
        return y_SBHP.flatten(-2)

    def _project(self, x: Tensor | RecomputableOutput) -> tuple[Tensor, Tensor]:
        """Returns silu of queries, keys and values, and z."""
        *heads, gate = self.in_proj.sections
        qkv, z = self.in_proj(x).split((sum(heads), gate), dim=-1)
        return F.silu(qkv), z

    def _scan_inputs(self, qkv_SBC: Tensor) -> ScanInputs:
        x_SBHP, B_SBGN, C_SBGN = self._split_heads(qkv_SBC)
        heads = self._fixed_heads(x_SBHP)
        return ScanInputs(x_SBHP, heads.step.expand(x_SBHP.shape[:-1]), heads.A_H, B_SBGN, C_SBGN, heads.decode.D_H)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values by heads of the kernels, and keys and queries by heads."""
        q, k, v = qkv.chunk(3, dim=-1)
        width, part = self.spec.head_dim, self.spec.head_dim // self.spec.heads_per_group
        return v.unflatten(-1, (-1, part)), k.unflatten(-1, (-1, width)), q.unflatten(-1, (-1, width))

    def _gated_output(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self.norm.normalize(y, None) * z.sigmoid())

    def _fixed_heads(self, like: Tensor) -> _FixedHeads:
        """Returns what is fixed of this rank's heads, on the device of activations and as exact as the scan, and made once."""
        wanted = (self.tensor_rank, like.device, compute_dtype(like.dtype))
        if self._heads_for != wanted:
            (rank, num_ranks), device, dtype = self._heads_for = wanted
            count = self.spec.num_heads // num_ranks
            slopes = self.spec.slopes(self.layer_index)[rank * count : (rank + 1) * count]
            slopes = [slope for slope in slopes for _ in range(self.spec.heads_per_group)]
            with torch.inference_mode(False):  # backward may save them later
                self._heads = _FixedHeads.build(slopes, dtype, device)
        return self._heads
