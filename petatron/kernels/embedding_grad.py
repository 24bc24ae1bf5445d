"""Gradient of an embedding table: row v is the sum of the gradients of the tokens with id v.

Accumulated straight into the table's `main_grad`, in its precision. On CUDA the order of additions must be fixed, since atomic
additions have a different order in every run: `kernels/triton/embedding_grad.py` sorts first.

T tokens, D hidden, V rows of the table on this device.
"""

from __future__ import annotations

from torch import Tensor


def embedding_grad(ids_T: Tensor, grad_TD: Tensor, out_VD: Tensor, *, accumulate: bool) -> None:
    """Writes the table's gradient to `out_VD`, or adds it; an id outside 0..V-1 belongs to another rank and adds nothing."""
    if not accumulate:
        out_VD.zero_()
    not_local = (ids_T < 0) | (ids_T >= out_VD.shape[0])
    rows = grad_TD.to(out_VD.dtype).masked_fill(not_local.unsqueeze(1), 0)
    out_VD.index_add_(0, ids_T.masked_fill(not_local, 0), rows)
