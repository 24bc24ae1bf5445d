"""`ActivationShape`: one rank's share of a micro-batch, whatever the model; with it a layer kind counts the bytes it saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.run import RunConfig
from petatron.kernels.size_limits import BLOCK, MX_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """One rank's share of a micro-batch, and the precision it is computed in.

    element_bytes: bytes of an activation. batch and sequence are those of the rank's tokens where they are gathered;
        whole_sequence is that of all context-parallel ranks.
    byte_dropout_masks: dropout saves a byte per element, as CUDA's kernel does, and not a number.
    ep, etp: expert-parallel and expert-tensor-parallel size.
    fully_sharded: autograd receives the weight gradients, the output head's between forward and backward.
    fp8_recipe: the recipe of FP8 GEMMs; None where there are none.
    fp8_output_head_backward: the output head's backward casts a chunk's gradient, and the weight, to FP8.
    """

    element_bytes: int
    batch: int
    sequence: int
    whole_sequence: int
    tp: int
    ep: int
    etp: int
    sequence_parallel: bool
    byte_dropout_masks: bool
    fully_sharded: bool
    fp8_recipe: str | None = None
    fp8_output_head_backward: bool = False

    @classmethod
    def from_config(cls, run: RunConfig, *, device: Literal["cpu", "cuda"]) -> ActivationShape:
        """Returns the shape of every rank of a resolved config."""
        parallel, precision = run.parallel, run.precision
        sequence_parallel = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        return cls(
            element_bytes=8 if precision.fp64 else 2 if precision.bf16 or precision.fp16 else 4,
            batch=run.train.micro_batch_size,
            sequence=run.model.seq_length // parallel.context_parallel_size,
            whole_sequence=run.model.seq_length,
            tp=parallel.tensor_model_parallel_size,
            ep=parallel.expert_model_parallel_size,
            etp=parallel.expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
            # Ranks that hold the same activation share a generator, whose masks are numbers.
            byte_dropout_masks=device == "cuda" and (sequence_parallel or parallel.tensor_model_parallel_size == 1),
            fully_sharded=parallel.data_parallel_sharding_strategy in FSDP_STRATEGIES and parallel.world_size > 1,
            fp8_recipe=None if precision.fp8_format is None else precision.fp8_recipe,
            fp8_output_head_backward=precision.fp8_format is not None and precision.fp8_output_head_backward,
        )

    def with_length(self, length: int | None) -> ActivationShape:
        """Returns the share of a micro-batch whose sequences have `length` tokens; None: as long as these."""
        if length is None or length == self.whole_sequence:
            return self
        return replace(self, sequence=length * self.sequence // self.whole_sequence, whole_sequence=length)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element that is computed in at least float32."""
        return max(self.element_bytes, 4)

    @property
    def gathered_tokens(self) -> int:
        """Tokens that a sharded linear sees."""
        return self.batch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.gathered_tokens // self.tp if self.sequence_parallel else self.gathered_tokens

    def activation_bytes(self, rows: int, width: int) -> int:
        """Bytes of `rows` vectors of this width."""
        return rows * width * self.element_bytes

    def dropout_mask_bytes(self, width: int, probability: float) -> int:
        """Bytes of the mask of dropout on the residual stream."""
        if probability == 0.0:
            return 0
        return self.tokens * width * (1 if self.byte_dropout_masks else self.element_bytes)

    def fp8_input_bytes(self, *widths: int) -> int:
        """Bytes of inputs, of these widths, that FP8 GEMMs save quantized; other GEMMs recompute their input."""
        if self.fp8_recipe is None:
            return 0
        tokens = self.gathered_tokens
        if self.fp8_recipe == "mxfp8":  # a scale is a byte
            return sum(tokens * width + tokens // MX_BLOCK * width for width in widths)
        scales = {"rowwise": 1, "blockwise": -(-tokens // BLOCK)}.get(self.fp8_recipe)
        return sum(tokens * width + 4 * (1 if scales is None else scales * width) for width in widths)

    def fp8_requantized_bytes(self, *widths: int) -> int:
        """Bytes that FP8 GEMMs save of inputs that they cast a second time in backward: the scale, where it is of the whole tensor."""
        return 4 * len(widths) if self.fp8_saves_scale else 0

    def fp8_column_input_bytes(self, *widths: int) -> int:
        """Bytes that column-parallel FP8 GEMMs save of norms' outputs: one that ranks share is saved quantized."""
        return self.fp8_requantized_bytes(*widths) if self.tp == 1 else self.fp8_input_bytes(*widths)

    @property
    def fp8_saves_scale(self) -> bool:
        """Whether a GEMM saves something of an input that it casts a second time, and so is repeated in a recomputed region."""
        return self.fp8_recipe in ("tensorwise", "delayed")
