"""The base classes of recurrent layer kinds: a state of fixed size that takes the sequence in order, most after a causal convolution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from petatron.layers.linear import Linear
from petatron.layers.parallel_slots import ContextSlot, SequenceParts
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchModule, BranchSpec
from petatron.layers.spec.generation_state import GenerationStep, RecurrentState, StateSlots, StateTensor
from petatron.layers.spec.generation_step_groups import SequenceGroup, group_outputs
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.sharding.shard_spec import Section, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentBranchSpec(BranchSpec):
    """A mixer with a recurrence, which packed documents reset.

    chunk_size: tokens of a chunk of the recurrence, which changes no result.
    std, out_std: of the initial weights of the first and of the last GEMM.
    weights_formula, mixing_formula: what it adds to the FLOPs of a model, in the symbols of `estimate/flops.py`, with {c} for the
    tokens of a chunk; None: that file has them.
    """

    weights_formula: ClassVar[str | None] = None
    mixing_formula: ClassVar[str | None] = None
    sequence_sharding = "contiguous"
    separates_documents = can_generate = True

    hidden_size: int
    chunk_size: int
    std: float
    out_std: float
    output_multiplier: float = 1.0

    @property
    def prompt_is_capturable(self) -> bool:
        """The host cuts prompts into sequences."""
        return False

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """The width of all heads, which the last GEMM takes."""

    @abstractmethod
    def recurrence_state(self, tp: int) -> StateTensor:
        """Returns the state of one rank's heads."""

    @abstractmethod
    def sections(self) -> dict[str, tuple[int, int]]:
        """Returns (rows, units) of each part of the first GEMM's output: tensor parallelism cuts rows only between units, such as heads."""

    def in_proj_params(self) -> dict[str, ParamSpec]:
        inputs = tuple(Section(f"in_{name}", *rows) for name, rows in self.sections().items())
        rows, shard = {section.name: section.rows for section in inputs}, Shard(tp=0, sections=inputs)
        return with_prefix("in_proj", linear_params(self.hidden_size, rows, shard, bias=False, std=self.std))

    def out_proj_params(self) -> dict[str, ParamSpec]:
        out_proj = linear_params(self.inner_size, self.hidden_size, Shard(tp=1), bias=False, std=self.out_std)
        return with_prefix("out_proj", out_proj)

    def generation_state(self, tp: int) -> RecurrentState | None:
        return RecurrentState((self.recurrence_state(tp),))

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        return {self.region: self.saved_bytes(shape, recomputed)}

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """The last GEMM is not repeated, since its input is the last tensor saved, unless in FP8 a scale comes after it."""
        out = 2.0 * shape.gathered_tokens * self.inner_size * self.hidden_size / shape.tp
        return self.forward_flops(shape) - (0.0 if shape.fp8_saves_scale else out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedBranchSpec(RecurrentBranchSpec):
    """A recurrence of what a convolution over the last `conv_width` tokens makes, the newest included. Packed documents reset both."""

    norm_eps: float
    conv_width: int

    @abstractmethod
    def conv_channels(self, tp: int) -> int:
        """Returns the channels of one rank's convolution."""

    def generation_state(self, tp: int) -> RecurrentState | None:
        window = StateTensor("conv", (self.conv_width - 1, self.conv_channels(tp)))
        return RecurrentState((window, self.recurrence_state(tp)))

    def halo_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the last tokens of the part before, under context parallelism."""
        return shape.activation_bytes((self.conv_width - 1) * shape.batch, self.conv_channels(shape.tp))


class RecurrentBranch(BranchModule):
    """A recurrence between two projections, `in_proj` and `out_proj`; `step_kernels`, of the `step_operation`, decode one token."""

    fp8_linears = ("in_proj", "out_proj")
    context_slots: Mapping[str, ContextSlot] = {"parts": "sequence parts"}
    step_operation: ClassVar[str]

    def __init__(self, spec: RecurrentBranchSpec, layer_index: int, *, step_kernels: Any) -> None:
        super().__init__()
        self.region, self.layer_index, self.step_kernels = spec.region, layer_index, step_kernels
        self.in_proj = Linear(spec.hidden_size, [rows for rows, _ in spec.sections().values()], bias=False)
        self.parts: SequenceParts | None = None

    def kernel_slots(self) -> Mapping[str, str]:
        return {"step_kernels": self.step_operation}

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {self.region: self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        return {self.region: (self,)}

    def advance(self, group: SequenceGroup, slots: StateSlots, *inputs_T: Tensor) -> Tensor:
        """Takes the tokens of some sequences into their states, and returns the recurrence's outputs [S, B, ...]."""
        raise NotImplementedError

    def generated_outputs(self, step: GenerationStep, *inputs_T: Tensor, like_T: Tensor) -> Tensor:
        """Returns the outputs of all rows of a generation step, from what the first projection gives of them."""
        slots = step.states[self.layer_index]
        outputs = [self.advance(group, slots, *inputs_T) for group in step.groups]
        return group_outputs(step.groups, outputs, like_T=like_T)
