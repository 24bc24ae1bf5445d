"""FP8 GEMMs: what is quantized when, with which scale, and what is saved for backward.

    forward     x8 = cast(x), y = x8 . w8;                   saved: x8 transposed, so x itself is not needed again
    backward    g8 = cast(g), dx = g8 . w8 transposed;       dw = g8 transposed . x8 transposed

Casts write both orientations (see `kernels/fp8/cast_and_gemm.py`). Where x is saved anyway by something else, or is recomputed in
backward from what is saved (the output of a norm), x8 is not saved: `Fp8Gemm.requantizing` casts x again in backward, with the same scale
and so to the same bits. That costs 3 bytes of traffic per element, and 2 more to write what is recomputed; so the output of an
activation function, which is four times as wide, is saved as x8. So are inputs that tensor-parallel ranks share.

How often a weight is cast is in `fp8_weight.py`. The forward GEMM uses the tensor cores' fast accumulation, which is good enough for
activations; the two of backward do not. A weight gradient's GEMM has FP8 operands too and writes float32, the precision of the
gradient buffer.

| recipe     | scale of x, g             | scale of w      | passes over x and g |
|------------|---------------------------|-----------------|---------------------|
| tensorwise | amax of the tensor        | amax            | two                 |
| delayed    | amax of past steps        | amax            | one                 |
| rowwise    | each row of each operand  | each row        | two                 |
| blockwise  | each 1 x 128              | each 128 x 128  | one                 |
| mxfp8      | each 1 x 32               | each 1 x 32     | one                 |

With `hybrid`, gradients are e5m2 (more range), everything else e4m3 (more precision). Not so for blockwise: the hardware
multiplies blocks of e4m3 alone, and 128 numbers seldom need more range. Ranks that shard a tensor do not exchange their amax:
scales are powers of two, so each rank may have its own. A GEMM whose sizes the hardware does not support (multiples of 16, for
blockwise of 128, for mxfp8 of 32) runs in the precision of its tensors.

In the first step that uses a tensor, delayed scaling has no amax history and uses the tensor's own amax. Histories belong to
a rank and its shards; a checkpoint saves them for a run in the same layout.

R rows, D input width, O output width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.config.schema.precision import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Kernels, Fp8Matrix, Fp8Operand, Orientation
from petatron.kernels.fp8.mxfp8 import MxKernels
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm, Tensors, WeightGrad
from petatron.kernels.moe.grouped_gemm import ExpertCounts, GroupedGemm, GroupedWeightGrad, WriteGrad, write_grad
from petatron.kernels.size_limits import FP8_SIZE_MULTIPLE, MX_BLOCK, SCALINGS, Scaling, fp8_size_multiple
from petatron.layers.ops.fp8_scaling import CurrentTensorwiseScaling, DelayedScaling, Quantizer, StatelessScaling
from petatron.layers.ops.fp8_weight import Fp8WeightCache, cast_with_known_scale

_log = get_logger(__name__)

GemmKernels = Fp8Kernels | MxKernels
"""The kernels of a recipe's `operation`."""


def is_fp8_layer(config: PrecisionConfig, layer_index: int, *, num_layers: int) -> bool:
    """Whether the GEMMs of a layer (counted from 0 over the whole model) are FP8."""
    if config.fp8_format is None or not config.first_last_layers_bf16:
        return config.fp8_format is not None
    start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    return start <= layer_index < num_layers - end


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """The FP8 flags, resolved."""

    scaling: Scaling
    grad_dtype: torch.dtype
    delayed: bool = False
    amax_history_len: int = 1
    most_recent: bool = True

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> Fp8Recipe:
        return cls(
            scaling=SCALINGS[config.fp8_recipe],
            grad_dtype=E5M2 if config.fp8_format == "hybrid" and config.fp8_recipe != "blockwise" else E4M3,
            delayed=config.fp8_recipe == "delayed",
            amax_history_len=config.fp8_amax_history_len,
            most_recent=config.fp8_amax_compute_algo == "most_recent",
        )

    @property
    def size_multiple(self) -> int:
        """All sizes of an FP8 GEMM are multiples of this."""
        return fp8_size_multiple(self.scaling)

    @property
    def uses_attached_amax(self) -> bool:
        """Whether casts use the amax that a norm or activation attached to its output."""
        return self.scaling == "tensorwise" and not self.delayed

    @property
    def operation(self) -> str:
        """The kernels of the recipe, by their name in the registry."""
        return "MXFP8 casts and GEMMs" if self.scaling == "block_1x32" else "FP8 casts and GEMMs"

    def quantizer(self, kernels: GemmKernels, dtype: torch.dtype) -> Quantizer:
        """Builds the quantizer of activations or gradients."""
        if isinstance(kernels, MxKernels):
            return StatelessScaling(kernels.cast_block_1x32, dtype)
        if self.delayed:
            return DelayedScaling(kernels, dtype, length=self.amax_history_len, most_recent=self.most_recent)
        if self.uses_attached_amax:
            return CurrentTensorwiseScaling(kernels, dtype)
        return StatelessScaling(kernels.cast_rowwise if self.scaling == "rowwise" else kernels.cast_block_1x128, dtype)

    def weight_cache(self, kernels: GemmKernels, *, keep: bool) -> Fp8WeightCache:
        if isinstance(kernels, MxKernels):
            return Fp8WeightCache(StatelessScaling(kernels.cast_block_1x32, E4M3), keep=keep)
        if self.scaling == "tensorwise":
            return Fp8WeightCache(CurrentTensorwiseScaling(kernels, E4M3), keep=keep, tensorwise_kernels=kernels)
        cast = kernels.cast_rowwise if self.scaling == "rowwise" else kernels.cast_block_128x128
        return Fp8WeightCache(StatelessScaling(cast, E4M3), keep=keep)

    def param_gather_scaling(self, shape: torch.Size) -> Scaling | None:
        """Returns the weight's scaling if both its orientations hold the same values; None if not, or if it is not quantized."""
        if self.scaling in ("rowwise", "block_1x32") or not sizes_fit(shape, self.size_multiple):
            return None
        return "block_128x128" if self.scaling == "block_1x128" else "tensorwise"


@dataclass(frozen=True, slots=True)
class Fp8WeightGrad:
    """dw = g8 transposed . x8 transposed; `x` is the quantized input, or the cast of an input that is available in backward."""

    grad: Fp8Operand
    x: Fp8Operand | Callable[[Tensor], Fp8Operand]
    kernels: GemmKernels

    @property
    def needs_input(self) -> bool:
        return not isinstance(self.x, Fp8Operand)

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        x = self.x
        if not isinstance(x, Fp8Operand):
            assert x_RD is not None
            x = x(x_RD)
        if accumulate:
            out.add_(self.kernels.gemm(self.grad, x, dtype=out.dtype, fast=False))
        else:
            self.kernels.gemm(self.grad, x, dtype=out.dtype, fast=False, out=out)


class Fp8Gemm:
    """The FP8 GEMMs of one weight; call `new_step` after every update of the weight."""

    def __init__(
        self,
        recipe: Fp8Recipe,
        kernels: GemmKernels,
        *,
        cache_weights: bool = True,
        fallback: Gemm = PLAIN_GEMM,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        self._recipe, self._kernels, self._fallback, self._report = recipe, kernels, fallback, report
        self._input_quantizer = recipe.quantizer(kernels, E4M3)
        self._grad_quantizer = recipe.quantizer(kernels, recipe.grad_dtype)
        self._weight_cache = recipe.weight_cache(kernels, keep=cache_weights)

    def forward(
        self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None, *, requantizes: bool = False
    ) -> tuple[Tensor, Tensors]:
        """Multiplies, and saves the quantized input. If it `requantizes`, only the scale of a second cast, if it needs one."""
        if not self._supports(x_RD.shape[0], weight):
            self._report(fallback_message(x_RD.shape[0], weight.shape, self._recipe.size_multiple))
            return self._fallback.forward(x_RD, weight, bias)
        x = self._input_quantizer(x_RD, orientation="rows" if requantizes else "both")
        w = self._weight_cache.get(weight, "rows", num_rows=x_RD.shape[0])
        y = self._kernels.gemm(x.rows, w.rows, dtype=x_RD.dtype, fast=True)
        y = y if bias is None else y.add_(bias)
        if requantizes:
            return y, (x.rows.scale,) if x.rows.scaling == "tensorwise" else ()
        return y, (x.columns.values, x.columns.scale)

    def backward(
        self, grad_RO: Tensor, weight: Tensor, saved: Tensors, *, requantizes: bool = False
    ) -> tuple[Tensor, WeightGrad]:
        if not self._supports(grad_RO.shape[0], weight):
            return self._fallback.backward(grad_RO, weight, saved)
        grad = self._grad_quantizer(grad_RO)
        w = self._weight_cache.get(weight, "columns", num_rows=grad_RO.shape[0])
        x_grad = self._kernels.gemm(grad.rows, w.columns, dtype=grad_RO.dtype, fast=False)
        if requantizes:
            x = partial(self._requantize_input, saved=saved)
        else:
            x = Fp8Operand(saved[0], saved[1], self._recipe.scaling)
        return x_grad, Fp8WeightGrad(grad.columns, x, self._kernels)

    def requantizing(self) -> Gemm:
        """Returns the same GEMMs for an input that is available in backward: they save none of it, and cast it again."""
        return _RequantizingGemm(self)

    def _requantize_input(self, x_RD: Tensor, saved: Tensors) -> Fp8Operand:
        """Returns the transposed input, to the bits that the cast of the forward pass would have given."""
        if not saved:
            return self._input_quantizer(x_RD, orientation="columns").columns
        assert isinstance(self._kernels, Fp8Kernels), "blocks of 32 have no scale of the whole tensor"
        return cast_with_known_scale(x_RD, saved[0], self._kernels, orientation="columns").columns

    def _supports(self, num_rows: int, weight: Tensor) -> bool:
        """Whether a GEMM with this number of rows can run in FP8."""
        return sizes_fit((num_rows, *weight.shape), self._recipe.size_multiple)

    def new_step(self, micro_batches: int) -> None:
        """Drops the cached weight and advances the amax histories; `micro_batches` is how many will use the weight."""
        self._input_quantizer.new_step()
        self._grad_quantizer.new_step()
        self._weight_cache.new_step(micro_batches)

    def drop_cached_weight(self) -> None:
        self._weight_cache.drop()

    @property
    def weight_memory(self) -> object:
        """The memory of the weight in FP8, of whatever is cached now."""
        return self._weight_cache.memory

    def end_step(self) -> None:
        """Drops the cached weight; until the next step starts, amax is not recorded."""
        self._weight_cache.drop()
        for history in self.amax_histories().values():
            history.pause()

    def amax_histories(self) -> dict[str, DelayedScaling]:
        """Returns the amax histories of activations and gradients, which an exact resume needs; empty but for delayed scaling."""
        parts = {"x": self._input_quantizer, "grad": self._grad_quantizer}
        return {name: part for name, part in parts.items() if isinstance(part, DelayedScaling)}


@dataclass(frozen=True, slots=True)
class _RequantizingGemm:
    """The GEMMs of an input that is available in backward; of one that does not fit FP8, those in the precision of its tensors."""

    gemm: Fp8Gemm

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return self.gemm.forward(x_RD, weight, bias, requantizes=True)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return self.gemm.backward(grad_RO, weight, saved, requantizes=True)


def fp8_gemm_factory(
    config: PrecisionConfig, *, kernels: GemmKernels, cache_weights: bool = True
) -> Callable[[], Fp8Gemm]:
    """Returns a function that builds the `Fp8Gemm` of each weight; they share one `LogOnce`."""
    recipe, report = Fp8Recipe.from_config(config), LogOnce()
    return lambda: Fp8Gemm(recipe, kernels, cache_weights=cache_weights, report=report)


class Fp8ExpertGemms:
    """The GEMMs of one layer's experts, a weight [E, O, D], with a scale per row, or, in MXFP8, per 32 elements of a row.

    All are e4m3, which is all that torch's grouped kernel supports.

    Weight gradients stay in the precision of the tensors: experts have varying numbers of rows, and a GEMM that sums over them
    needs multiples of 16 and two more casts, which cost what it gains (figures in docs/fp8.md). So only the weight is cast
    transposed, once per step.
    """

    def __init__(self, kernels: GemmKernels, *, cache_weights: bool = True) -> None:
        self._kernels = kernels
        self.size_multiple = MX_BLOCK if isinstance(kernels, MxKernels) else FP8_SIZE_MULTIPLE
        self._weight_cache = Fp8WeightCache(StatelessScaling(self._cast_weight, E4M3), keep=cache_weights)

    def __call__(self, counts: ExpertCounts, write_grad: WriteGrad = write_grad) -> Gemm:
        """Returns the grouped GEMM for rows sorted by expert, with their counts."""
        return _Fp8GroupedGemm(self, counts, write_grad)

    def new_step(self, micro_batches: int) -> None:
        """Drops the cached weight. It is cached for any number of micro-batches: an expert has few rows for its weight."""
        self._weight_cache.drop()

    def end_step(self) -> None:
        self._weight_cache.drop()

    drop_cached_weight = end_step

    @property
    def weight_memory(self) -> object:
        """The memory of the weight in FP8, of whatever is cached now."""
        return self._weight_cache.memory

    def grouped_gemm(self, x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts, *, transposed: bool) -> Tensor:
        quantized = self._weight_cache.get(weight_EOD, "both")
        x = self._kernels.cast_rowwise_operand(x_RD, E4M3)
        if isinstance(counts, int):
            counts = torch.full(weight_EOD.shape[:1], counts, device=x_RD.device)
        matrices = quantized.columns if transposed else quantized.rows
        return self._kernels.grouped_gemm(x.values, x.scale, matrices, counts, dtype=x_RD.dtype, fast=not transposed)

    def _cast_weight(self, weight_EOD: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
        assert orientation == "both"
        return self._kernels.cast_matrices(weight_EOD, dtype)


@dataclass(frozen=True, slots=True)
class _Fp8GroupedGemm:
    experts: Fp8ExpertGemms
    counts: ExpertCounts
    write_grad: WriteGrad

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        assert bias is None, "the biases of experts are added by `GroupedLinear`"
        if not self._supports(x_RD, weight):
            return GroupedGemm(self.counts).forward(x_RD, weight)
        return self.experts.grouped_gemm(x_RD, weight, self.counts, transposed=False), ()

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        if not self._supports(grad_RO, weight):
            return GroupedGemm(self.counts, self.write_grad).backward(grad_RO, weight, saved)
        x_grad = self.experts.grouped_gemm(grad_RO, weight, self.counts, transposed=True)
        return x_grad, GroupedWeightGrad(grad_RO.contiguous(), self.counts, self.write_grad)

    def _supports(self, rows: Tensor, weight: Tensor) -> bool:
        return rows.shape[0] > 0 and sizes_fit(weight.shape[1:], self.experts.size_multiple)


class LogOnce:
    """Logs each text the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.info(text)


def sizes_fit(sizes: tuple[int, ...] | torch.Size, multiple: int) -> bool:
    """Whether an FP8 GEMM can have these sizes."""
    return all(size > 0 and size % multiple == 0 for size in sizes)


def fallback_message(rows: int, shape: torch.Size, multiple: int) -> str:
    """Says that a GEMM runs in the precision of its tensors, and why."""
    sizes = f"{rows} rows times a weight of {shape[0]} x {shape[1]}"
    return f"a GEMM of {sizes} does not run in FP8, which needs multiples of {multiple}"
