"""FP8 GEMMs: what is quantised when, with which scale, and what is saved for backward.

    forward     x8 = cast(x), y = x8 . w8;                   saved: x8 transposed, so x itself is not needed again
    backward    g8 = cast(g), dx = g8 . w8 transposed;       dw = g8 transposed . x8 transposed

Each cast writes both orientations (see `kernels/fp8/cast_and_gemm.py`). The weight is cast once per optimizer step, however many
micro-batches use it. The forward GEMM uses the tensor cores' fast accumulation, which is good enough for activations; the two
of backward do not. A weight gradient's GEMM has FP8 operands too and writes float32, the precision of the gradient buffer.

| recipe     | scale of x, g             | scale of w      | passes over x and g |
|------------|---------------------------|-----------------|---------------------|
| tensorwise | amax of the tensor        | amax            | two                 |
| delayed    | amax of past steps        | amax            | one                 |
| rowwise    | each row of each operand  | each row        | two                 |
| blockwise  | each 1 x 128              | each 128 x 128  | one                 |

With `hybrid`, gradients are e5m2 (more range), everything else e4m3 (more precision). Not so for blockwise: the hardware
multiplies blocks of e4m3 alone, and 128 numbers seldom need more range. Ranks that shard a tensor do not exchange their amax:
scales are powers of two, so each rank may have its own. A GEMM whose sizes the hardware does not support (multiples of 16, for
blockwise of 128) runs in the precision of its tensors.

In the first step that uses a tensor, delayed scaling has no amax history and uses the tensor's own amax. Histories belong to
a rank and its shards; a checkpoint saves them for a run in the same layout.

R rows, D input width, O output width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.config.schema.parallel import PrecisionConfig
from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, E5M2, Fp8Kernels, Fp8Matrix, Fp8Operand, Scaling
from petatron.kernels.gemm import PLAIN_GEMM, Gemm, Tensors, WeightGrad
from petatron.kernels.moe.grouped_gemm import ExpertCounts, GroupedGemm, GroupedWeightGrad, WriteGrad, write_grad

_log = get_logger(__name__)

_SCALINGS: dict[str, Scaling] = {"tensorwise": "tensor", "delayed": "tensor", "rowwise": "rows", "blockwise": "blocks"}


def is_fp8_layer(config: PrecisionConfig, layer_index: int, *, num_layers: int) -> bool:
    """Whether the GEMMs of a layer (counted from 0 over the whole model) are FP8."""
    if config.fp8_format is None or not config.first_last_layers_bf16:
        return config.fp8_format is not None
    start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    return start <= layer_index < num_layers - end


class Quantiser(Protocol):
    """Quantises a tensor, with state or without."""

    def __call__(self, x_RC: Tensor) -> Fp8Matrix: ...

    def new_step(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CurrentScaling:
    """Scales come from the tensor itself."""

    cast: Callable[[Tensor], Fp8Matrix]

    def __call__(self, x_RC: Tensor) -> Fp8Matrix:
        return self.cast(x_RC)

    def new_step(self) -> None:
        pass


class DelayedScaling:
    """The scale comes from the amax of past steps, so that a cast is one pass.

    Between `pause` and the next step amax is not recorded: an evaluation does not change what is trained. The scale holds for one step:
    what was quantised in a step is used before the next begins.
    """

    def __init__(self, kernels: Fp8Kernels, dtype: torch.dtype, *, length: int, most_recent: bool) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._length, self._most_recent = length, most_recent
        self._history: Tensor | None = None
        self._scale: Tensor | None = None
        self._used = False
        self._paused = False

    def __call__(self, x_RC: Tensor) -> Fp8Matrix:
        amax = self._current_amax(x_RC.device)
        if self._scale is not None:
            return self._kernels.cast_delayed(x_RC, self._dtype, scale=self._scale, amax=amax)
        self._kernels.update_amax(x_RC, amax)
        return self._kernels.cast_tensor(x_RC, self._dtype, amax=amax)

    def _current_amax(self, device: torch.device) -> Tensor:
        """Returns the history entry of this step's amax."""
        if self._paused:
            return torch.zeros(1, dtype=torch.float32, device=device)
        history = self._history
        if history is None:
            history = self._history = torch.zeros(self._length, dtype=torch.float32, device=device)
        self._used = True
        return history[:1]

    def pause(self) -> None:
        self._paused = True

    def new_step(self) -> None:
        self._paused = False
        if not self._used:
            return
        assert self._history is not None
        if self._scale is None:
            self._scale = torch.empty(1, dtype=torch.float32, device=self._history.device)
        # In place, and always at the same entry: a CUDA graph that captured a step finds them where they were.
        self._kernels.update_scale(self._history, self._scale, self._dtype, most_recent=self._most_recent)
        self._used = False

    @property
    def kind(self) -> str:
        """Identifies the state's format: only a state of the same kind can be loaded."""
        return f"{self._dtype} over {self._length} steps"

    def state(self) -> Tensor:
        """Returns [2 + length] on the host: the scale (0: none yet), whether the history was updated in this step (1 or 0), and
        the history, its current entry first."""
        history = torch.zeros(self._length) if self._history is None else self._history.cpu()
        scale = torch.zeros(1) if self._scale is None else self._scale.cpu()
        return torch.cat([scale, torch.tensor([float(self._used)]), history])

    def load_state(self, state: Tensor, device: torch.device) -> None:
        scale, used = state[:2].tolist()
        if self._scale is not None and self._history is not None and scale:
            self._scale.copy_(state[:1])
            self._history.copy_(state[2:])
        else:
            self._scale = state[:1].to(device, copy=True) if scale else None
            self._history = state[2:].to(device, copy=True)
        self._used = bool(used)

    def undo_point(self) -> Callable[[], None]:
        """Returns a function that undoes what the host has noted since, of casts that the device has not run."""
        scale, used, paused = self._scale, self._used, self._paused

        def undo() -> None:
            self._scale, self._used, self._paused = scale, used, paused

        return undo


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
            scaling=_SCALINGS[config.fp8_recipe],
            grad_dtype=E5M2 if config.fp8_format == "hybrid" and config.fp8_recipe != "blockwise" else E4M3,
            delayed=config.fp8_recipe == "delayed",
            amax_history_len=config.fp8_amax_history_len,
            most_recent=config.fp8_amax_compute_algo == "most_recent",
        )

    @property
    def size_multiple(self) -> int:
        """All sizes of an FP8 GEMM are multiples of this."""
        return BLOCK if self.scaling == "blocks" else 16

    def quantiser(self, kernels: Fp8Kernels, dtype: torch.dtype) -> Quantiser:
        """Builds the quantiser of activations or gradients."""
        if self.delayed:
            return DelayedScaling(kernels, dtype, length=self.amax_history_len, most_recent=self.most_recent)
        casts = {"tensor": kernels.cast_tensor, "rows": kernels.cast_rows, "blocks": kernels.cast_blocks}
        return CurrentScaling(partial(casts[self.scaling], dtype=dtype))

    def weight_quantiser(self, kernels: Fp8Kernels) -> Callable[[Tensor], Fp8Matrix]:
        casts = {"tensor": kernels.cast_tensor, "rows": kernels.cast_rows, "blocks": kernels.cast_blocks_2d}
        return partial(casts[self.scaling], dtype=E4M3)

    def fp8_gather_scaling(self, shape: torch.Size) -> Scaling | None:
        """Returns the weight's scaling if both its orientations hold the same values; None if not, or if it is not quantised."""
        if self.scaling == "rows" or not _sizes_fit(shape, self.size_multiple):
            return None
        return "squares" if self.scaling == "blocks" else "tensor"


class _Fp8WeightCache:
    """Caches a weight in FP8 for one step; with `keep` False it is quantised at each use (gathered weights are freed between uses)."""

    def __init__(self, cast: Callable[[Tensor], Fp8Matrix], *, keep: bool) -> None:
        self._cast, self._keep = cast, keep
        self._cached: Fp8Matrix | None = None

    def get(self, weight: Tensor) -> Fp8Matrix:
        if self._cached is not None:
            return self._cached
        quantised = self._cast(weight.detach())
        if self._keep:
            self._cached = quantised
        return quantised

    def new_step(self) -> None:
        self._cached = None


@dataclass(frozen=True, slots=True)
class Fp8WeightGrad:
    """dw = g8 transposed . x8 transposed."""

    grad: Fp8Operand
    x: Fp8Operand
    kernels: Fp8Kernels
    needs_input: bool = False

    def write(self, x_RD: Tensor | None, out: Tensor, *, accumulate: bool) -> None:
        if accumulate:
            out.add_(self.kernels.gemm(self.grad, self.x, dtype=out.dtype, fast=False))
        else:
            self.kernels.gemm(self.grad, self.x, dtype=out.dtype, fast=False, out=out)


class Fp8Gemm:
    """The FP8 GEMMs of one weight; call `new_step` after every update of the weight."""

    def __init__(
        self,
        recipe: Fp8Recipe,
        kernels: Fp8Kernels,
        *,
        cache_weights: bool = True,
        fallback: Gemm = PLAIN_GEMM,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        self._recipe, self._kernels, self._fallback, self._report = recipe, kernels, fallback, report
        self._input_quantiser = recipe.quantiser(kernels, E4M3)
        self._grad_quantiser = recipe.quantiser(kernels, recipe.grad_dtype)
        self._weight_cache = _Fp8WeightCache(recipe.weight_quantiser(kernels), keep=cache_weights)

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, Tensors]:
        if not _sizes_fit((x_RD.shape[0], *weight.shape), self._recipe.size_multiple):
            self._report(_fallback_message(x_RD.shape[0], weight.shape, self._recipe.size_multiple))
            return self._fallback.forward(x_RD, weight)
        x = self._input_quantiser(x_RD)
        y = self._kernels.gemm(x.rows, self._weight_cache.get(weight).rows, dtype=x_RD.dtype, fast=True)
        return y, (x.columns.values, x.columns.scale)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        if not saved:
            return self._fallback.backward(grad_RO, weight, saved)
        values, scale = saved
        grad = self._grad_quantiser(grad_RO)
        x_grad = self._kernels.gemm(grad.rows, self._weight_cache.get(weight).columns, dtype=grad_RO.dtype, fast=False)
        return x_grad, Fp8WeightGrad(grad.columns, Fp8Operand(values, scale, self._recipe.scaling), self._kernels)

    def new_step(self) -> None:
        """Drops the cached weight and advances the amax histories."""
        for part in (self._input_quantiser, self._grad_quantiser, self._weight_cache):
            part.new_step()

    def drop_cached_weight(self) -> None:
        self._weight_cache.new_step()

    def weight_changed(self) -> None:
        """Drops the cached weight without a step; amax is not recorded until the next step."""
        self._weight_cache.new_step()
        for history in self.amax_histories().values():
            history.pause()

    def amax_histories(self) -> dict[str, DelayedScaling]:
        """Returns the amax histories of activations and gradients, which an exact resume needs; empty but for delayed scaling."""
        parts = {"x": self._input_quantiser, "grad": self._grad_quantiser}
        return {name: part for name, part in parts.items() if isinstance(part, DelayedScaling)}


def fp8_gemm_factory(
    config: PrecisionConfig, *, kernels: Fp8Kernels, cache_weights: bool = True
) -> Callable[[], Fp8Gemm]:
    """Returns a function that builds the `Fp8Gemm` of each weight; they share one `LogOnce`."""
    recipe, report = Fp8Recipe.from_config(config), LogOnce()
    return lambda: Fp8Gemm(recipe, kernels, cache_weights=cache_weights, report=report)


class Fp8ExpertGemms:
    """The GEMMs of one layer's experts, a weight [E, O, D], with a scale per row; torch's grouped kernel supports only e4m3.

    Weight gradients stay in the precision of the tensors: experts have varying numbers of rows, and a GEMM that sums over them
    needs multiples of 16 and two more casts, which cost what it gains (figures in docs/fp8.md). So only the weight is cast
    transposed, once per step.
    """

    def __init__(self, kernels: Fp8Kernels, *, cache_weights: bool = True) -> None:
        self._kernels = kernels
        self._weight_cache = _Fp8WeightCache(self._cast_weight, keep=cache_weights)

    def __call__(self, counts: ExpertCounts, write_grad: WriteGrad = write_grad) -> Gemm:
        """Returns the grouped GEMM for rows sorted by expert, with their counts."""
        return _Fp8GroupedGemm(self, counts, write_grad)

    def new_step(self) -> None:
        self._weight_cache.new_step()

    weight_changed = drop_cached_weight = new_step

    def grouped_gemm(self, x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts, *, transposed: bool) -> Tensor:
        quantised = self._weight_cache.get(weight_EOD)
        x = self._kernels.cast_rows_only(x_RD, E4M3)
        if isinstance(counts, int):
            counts = torch.full(weight_EOD.shape[:1], counts, device=x_RD.device)
        matrices = quantised.columns if transposed else quantised.rows
        return self._kernels.grouped_gemm(x.values, x.scale, matrices, counts, dtype=x_RD.dtype, fast=not transposed)

    def _cast_weight(self, weight_EOD: Tensor) -> Fp8Matrix:
        return self._kernels.cast_matrices(weight_EOD, E4M3)


@dataclass(frozen=True, slots=True)
class _Fp8GroupedGemm:
    experts: Fp8ExpertGemms
    counts: ExpertCounts
    write_grad: WriteGrad

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, Tensors]:
        if not self._supports(x_RD, weight):
            return GroupedGemm(self.counts).forward(x_RD, weight)
        return self.experts.grouped_gemm(x_RD, weight, self.counts, transposed=False), ()

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        if not self._supports(grad_RO, weight):
            return GroupedGemm(self.counts, self.write_grad).backward(grad_RO, weight, saved)
        x_grad = self.experts.grouped_gemm(grad_RO, weight, self.counts, transposed=True)
        return x_grad, GroupedWeightGrad(grad_RO.contiguous(), self.counts, self.write_grad)

    def _supports(self, rows: Tensor, weight: Tensor) -> bool:
        return rows.shape[0] > 0 and _sizes_fit(weight.shape[1:], 16)


class LogOnce:
    """Logs each text the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.info(text)


def _sizes_fit(sizes: tuple[int, ...] | torch.Size, multiple: int) -> bool:
    return all(size > 0 and size % multiple == 0 for size in sizes)


def _fallback_message(rows: int, shape: torch.Size, multiple: int) -> str:
    sizes = f"{rows} rows times a weight of {shape[0]} x {shape[1]}"
    return f"a GEMM of {sizes} does not run in FP8, which needs multiples of {multiple}"
