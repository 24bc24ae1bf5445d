"""What recurrent layer kinds have in common: a causal convolution, then a state of fixed size that takes the sequence in order."""

from __future__ import annotations

from abc import abstractmethod

from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch import BranchSpec, SequenceSharding
from petatron.layers.spec.generation_state import RecurrentState, StateTensor


class RecurrentBranchSpec(BranchSpec):
    """A mixer of a convolution over the last `conv_width` tokens and a recurrence. Packed documents reset both."""

    conv_width: int

    @property
    def sequence_sharding(self) -> SequenceSharding:
        return "contiguous"

    @property
    def separates_documents(self) -> bool:
        return True

    @property
    def can_generate(self) -> bool:
        return True

    @property
    def prompt_is_capturable(self) -> bool:
        """The host cuts prompts into sequences."""
        return False

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """The width of all heads, which the last GEMM takes."""

    @abstractmethod
    def conv_channels(self, tp: int) -> int:
        """Returns the channels of one rank's convolution."""

    @abstractmethod
    def recurrence_state(self, tp: int) -> StateTensor:
        """Returns the state of one rank's heads."""

    def generation_state(self, tp: int) -> RecurrentState | None:
        window = StateTensor("conv", (self.conv_width - 1, self.conv_channels(tp)))
        return RecurrentState((window, self.recurrence_state(tp)))

    def halo_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the last tokens of the part before, under context parallelism."""
        return shape.activation_bytes((self.conv_width - 1) * shape.batch, self.conv_channels(shape.tp))

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """The last GEMM is not repeated, since its input is the last tensor saved, unless in FP8 a scale comes after it."""
        out = 2.0 * shape.gathered_tokens * self.inner_size * self.hidden_size / shape.tp
        return self.forward_flops(shape) - (0.0 if shape.fp8_saves_scale else out)
