"""Gradient of a table of embeddings: row v of the table gets the sum of the gradients of the tokens with id v.

Added straight into the table's main gradient, in its precision. On CUDA the adding has to be ordered, since atomic additions
land in a different order in every run: `kernels/triton/embedding_grad.py` sorts first.

T tokens, D hidden, V rows of the table on this device.
"""

from __future__ import annotations

from torch import Tensor


def embedding_grad(ids_T: Tensor, grad_TD: Tensor, out_VD: Tensor, *, accumulate: bool) -> None:
    """`out` becomes the table's gradient, or is added to; an id outside 0..V-1 is another rank's and adds nothing."""
    if not accumulate:
        out_VD.zero_()
    elsewhere = (ids_T < 0) | (ids_T >= out_VD.shape[0])
    rows = grad_TD.to(out_VD.dtype).masked_fill(elsewhere.unsqueeze(1), 0)
    out_VD.index_add_(0, ids_T.masked_fill(elsewhere, 0), rows)
