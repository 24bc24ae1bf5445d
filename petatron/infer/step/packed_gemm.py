"""x W^T on a CPU with a weight that was packed once, for GEMMs of the few rows of a decode step.

A BLAS copies both operands of a GEMM into the order in which its kernel reads them. With thousands of rows that costs nothing; with 2 to 64
the copy of the weight is most of the GEMM. Two other orders of the weight are cheaper. [D, O] in place of [O, D] is copied faster. And
oneDNN has operations, those that PyTorch's own compiler uses for frozen weights, that take a weight in oneDNN's order and copy nothing,
but spend some 100 microseconds before they multiply. On Arm (OpenBLAS, float32, 8 rows, one thread) the first takes 0.5 to 0.88 of the
time at any size, the second 0.4 to 0.65 from a million elements and a width of 768 on. One row is a matrix-vector product, for which
nothing is copied. MKL copies less, so where PyTorch has it weights stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OPERATIONS = ("_linear_pointwise", "_reorder_linear_weight")
_MIN_ONEDNN_ELEMENTS, _MIN_ONEDNN_WIDTH = 500_000, 512
"""Of a weight, and of its input."""


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
