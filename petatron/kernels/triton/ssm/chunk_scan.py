"""The selective scan of Mamba-2 in Triton: states at the boundaries of chunks, then outputs or gradients of all chunks at once.

The equations are those of `kernels/ssm/chunk_scan.py`. How long a chunk is changes no result but by rounding, so the kernels take
their own: a longer one means fewer states in memory, and more work inside a chunk.

Device memory traffic in bf16, Mamba-2 2.7B (S 4096, B 8, H 80, P 64, G 1, N 128), at 4.0 TB/s; x, and y, are 335 MB:

| step                       | tensors as large as x                                      | ms    |
|----------------------------|------------------------------------------------------------|-------|
| forward, states            | x, and states of 64 tokens each, which count twice         | 0.25  |
| forward, outputs           | x, states, y                                               | 0.34  |
| backward, states           | x, and states of 64 tokens each, which count twice         | 0.25  |
| backward, their gradients  | gradient of y, and the gradients of states, likewise       | 0.25  |
| backward, all others       | x, states, gradients of y, of states and of x              | 0.59  |

S sequence, B batch, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.ssm.chunk_scan import ScanGrads
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.scan_grads import chunk_grads
from petatron.kernels.triton.ssm.scan_outputs import rows_from_states
from petatron.kernels.triton.ssm.scan_tiles import ChunkDecays, ScanRows, chunk_decays
from petatron.kernels.triton.ssm.scan_walk import STATE_DIM, walk

_CHUNK = 64
_WALKS = 192
"""With fewer sequences times heads, the rows of all chunks are computed at once."""
_ALIGNED_BYTES = 16


def chunk_scan(
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    x, B, C = _aligned_rows(x_SBHP, B_SBGN, C_SBGN)
    decays = chunk_decays(dt_SBH, A_H, starts_SB, _chunk(chunk_size, B))
    y, _, final = _scan(ScanRows(x, B, C, D_H, reverse=False), decays, _padded_state(initial_state, x, B), False)
    head_dim, state_dim = x_SBHP.shape[3], B_SBGN.shape[3]
    return y[..., :head_dim], final[..., :head_dim, :state_dim]


def chunk_scan_backward(
    grad_y_SBHP: Tensor,
    grad_final_state: Tensor | None,
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> ScanGrads:
    """See the reference; `chunk_size` is an upper bound."""
    grad_y, x, B, C = _aligned_rows(grad_y_SBHP, x_SBHP, B_SBGN, C_SBGN)
    decays = chunk_decays(dt_SBH, A_H, starts_SB, _chunk(chunk_size, B))
    forward = ScanRows(x, B, C, D_H, reverse=False)
    _, states, _ = walk(forward, decays, _padded_state(initial_state, x, B), write_states=True, write_rows=False)
    reverse = ScanRows(grad_y, C, B, D_H, reverse=True)
    grad_x, grad_states, grad_initial = _scan(reverse, decays, _padded_state(grad_final_state, x, B), True)
    assert states is not None and grad_states is not None
    grad_dt, grad_A, grad_B, grad_C, grad_D = chunk_grads(grad_y, x, A_H, B, C, decays, states, grad_states)
    head_dim, state_dim = x_SBHP.shape[3], B_SBGN.shape[3]
    return (
        grad_x[..., :head_dim],
        grad_dt.to(dt_SBH.dtype),
        grad_A.to(A_H.dtype),
        grad_B.to(B_SBGN.dtype)[..., :state_dim],
        grad_C.to(C_SBGN.dtype)[..., :state_dim],
        grad_D.to(D_H.dtype),
        None if initial_state is None else grad_initial[..., :head_dim, :state_dim].to(initial_state.dtype),
    )


def _scan(
    rows: ScanRows, decays: ChunkDecays, first: Tensor | None, keep_states: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the rows, the states that enter the chunks where they were written, and the one after the last."""
    _, batch, heads, _ = rows.rows_SBHP.shape
    in_one_walk = batch * heads >= _WALKS and rows.keys_SBGN.shape[3] <= STATE_DIM
    out, states, last = walk(rows, decays, first, write_states=keep_states or not in_one_walk, write_rows=in_one_walk)
    if out is None:
        assert states is not None
        out = rows_from_states(rows, decays, states)
    return out, states, last


def _chunk(most: int, B_SBGN: Tensor) -> int:
    """Returns the tokens of a chunk: a power of two of at least 16, the fewest rows of a GEMM. A wide state leaves fewer registers."""
    tokens = _CHUNK
    if B_SBGN.shape[3] > STATE_DIM or B_SBGN.dtype == torch.float32:
        tokens //= 2
    return max(1 << min(tokens, most).bit_length() - 1, 16)


def _aligned_rows(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors whose tiles the device can copy: rows contiguous, and each at a multiple of 16 bytes; else with zeros behind it."""
    return [_aligned(contiguous_rows(tensor)) for tensor in tensors]


def _aligned(tensor: Tensor) -> Tensor:
    multiple = _ALIGNED_BYTES // tensor.itemsize
    aligned = all(size % multiple == 0 for size in (*tensor.stride()[:-1], tensor.shape[-1]))
    if aligned and tensor.data_ptr() % _ALIGNED_BYTES == 0:
        return tensor
    return F.pad(tensor, (0, -tensor.shape[-1] % multiple)).contiguous()


def _padded_state(state: Tensor | None, x_SBHP: Tensor, B_SBGN: Tensor) -> Tensor | None:
    """Returns a state [B, H, P, N] with zeros where rows were padded."""
    if state is None:
        return None
    return F.pad(state, (0, B_SBGN.shape[3] - state.shape[3], 0, x_SBHP.shape[3] - state.shape[2]))
