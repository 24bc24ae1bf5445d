"""What recurrent layer kinds have in common: a state of fixed size that takes the sequence in order, most after a causal convolution."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch import BranchSpec
from petatron.layers.spec.generation_state import RecurrentState, StateTensor


class RecurrentBranchSpec(BranchSpec):
    """A mixer with a recurrence, which packed documents reset.

    weights_formula, mixing_formula: what it adds to the FLOPs of a model, in the symbols of `estimate/flops.py`, with {c} for the
    tokens of a chunk; None: that file has them.
    """

    weights_formula: ClassVar[str | None] = None
    mixing_formula: ClassVar[str | None] = None
    sequence_sharding = "contiguous"
    separates_documents = can_generate = True

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

    def generation_state(self, tp: int) -> RecurrentState | None:
        return RecurrentState((self.recurrence_state(tp),))

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """The last GEMM is not repeated, since its input is the last tensor saved, unless in FP8 a scale comes after it."""
        out = 2.0 * shape.gathered_tokens * self.inner_size * self.hidden_size / shape.tp
        return self.forward_flops(shape) - (0.0 if shape.fp8_saves_scale else out)


class ConvolvedBranchSpec(RecurrentBranchSpec):
    """A recurrence of what a convolution over the last `conv_width` tokens makes. Packed documents reset both."""

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
