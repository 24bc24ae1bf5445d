"""The GEMM of a weight on a CPU while an engine generates: with copies of the weight that are made once and not in every step.

Two kinds of copies, each where it pays: in float32, where the CPU has no instructions for the weight's dtype and a GEMM would convert it
(`kernels/matmul.py`); and packed, for decode steps of several sequences. Both compute what the GEMM without
them does, up to the order of its sums. They are read within the engine's steps only: whatever else runs the model reads the weight itself.

A BLAS copies both operands of a GEMM into the order in which its kernel reads them. With thousands of rows that costs nothing; with 2 to 64
the copy of the weight is most of the GEMM. Two other orders of the weight are cheaper. [D, O] in place of [O, D] is copied faster. And
oneDNN has operations, those that PyTorch's own compiler uses for frozen weights, that take a weight in oneDNN's order and copy nothing,
but spend some 100 microseconds before they multiply. On Arm (OpenBLAS, float32, 8 rows, one thread) the first takes 0.5 to 0.88 of the
time at any size, the second 0.4 to 0.65 from a million elements and a width of 768 on. One row is a matrix-vector product, for which
nothing is copied. MKL copies less, so where PyTorch has it weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype, to_compute_dtype
from petatron.kernels.gemm import PLAIN_GEMM, Tensors, WeightGrad
from petatron.kernels.matmul import is_widened, matmul

_OPERATIONS = ("_linear_pointwise", "_reorder_linear_weight")
_MIN_ONEDNN_ELEMENTS, _MIN_ONEDNN_WIDTH = 500_000, 512
"""Of a weight, and of its input."""
_MAX_FEW_ROWS = 64
_CALLS_BEFORE_PACKING = 3
"""So many GEMMs of few rows come before a weight is packed: a short prompt is one."""


@dataclass(slots=True, eq=False)
class HostGemm:
    """x W^T of one weight, which changes only before `forget_copies`."""

    owner: HostGemms
    _widened: Tensor | None = None
    _packed: Tensor | None = None
    _few_rows_calls: int = 0

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, Tensors]:
        return self.product(x_RD, weight), ()

    def product(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        """x W^T in the precision of both."""
        if not self.owner.in_step:
            return matmul(x_RD, weight.t())
        if x_RD.dtype == torch.float32 or not is_widened(x_RD, weight):
            return self._multiply(x_RD, weight)
        if self._widened is None:
            with torch.inference_mode(False), torch.no_grad():
                self._widened = weight.detach().to(compute_dtype(weight.dtype))
        return self._multiply(to_compute_dtype(x_RD), self._widened).to(x_RD.dtype)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        for x, out in zip(x_NRD, out_NRO):
            out.copy_(self.product(x, weight))

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return PLAIN_GEMM.backward(grad_RO, weight, saved)

    def forget_copies(self) -> None:
        """Forgets the copies: the weight has changed."""
        self._widened, self._packed, self._few_rows_calls = None, None, 0

    def _multiply(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        rows = x_RD.shape[0]
        if self._packed is None and 1 < rows <= _MAX_FEW_ROWS:
            self._few_rows_calls += 1
            if self._few_rows_calls == _CALLS_BEFORE_PACKING and packing_unsupported_reason(weight.dtype) is None:
                self._packed = pack_weight(weight)
        return x_RD @ weight.t() if self._packed is None or rows == 1 else packed_gemm(x_RD, self._packed)


class HostGemms:
    """The GEMMs of one engine."""

    def __init__(self) -> None:
        self.in_step = False
        self._gemms: list[HostGemm] = []

    def new(self) -> HostGemm:
        self._gemms.append(HostGemm(self))
        return self._gemms[-1]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it copies are made and read."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def forget_copies(self) -> None:
        """Forgets the copies: weights have changed."""
        for gemm in self._gemms:
            gemm.forget_copies()


def packing_unsupported_reason(dtype: torch.dtype) -> str | None:
    """Returns why weights of a dtype are not packed; None: they can be."""
    if dtype != torch.float32:
        return f"weights in {str(dtype).removeprefix('torch.')} are not packed"
    if torch.backends.mkl.is_available():
        return "MKL multiplies few rows without packing the weight"
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATIONS):
        return "this PyTorch has no oneDNN"
    return None


@torch.inference_mode(False)
@torch.no_grad()
def pack_weight(weight_OD: Tensor) -> Tensor:
    """Returns a copy of a weight that only `packed_gemm` reads: [D, O], or an opaque tensor of oneDNN."""
    weight = weight_OD.detach()
    if weight.numel() < _MIN_ONEDNN_ELEMENTS or weight.shape[1] < _MIN_ONEDNN_WIDTH:
        return weight.t().contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_gemm(x_RD: Tensor, packed: Tensor) -> Tensor:
    if packed.layout is torch.strided:
        return x_RD @ packed
    return torch.ops.mkldnn._linear_pointwise(x_RD, packed, None, "none", [], "")
