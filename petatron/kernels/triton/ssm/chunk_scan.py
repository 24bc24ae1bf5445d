"""The selective scan of Mamba-2 in Triton: sequential over chunks where there are many heads, else all chunks at once.

The equations are those of `kernels/ssm/chunk_scan.py`, the kernels' notation is in `scan_tiles.py`. How long a chunk is changes
no result but by rounding, so the kernels take their own: a longer one means fewer states in memory, and more work inside a chunk.

- Sequential (`sequential_scan.py`, `sequential_scan_coefficient_grads.py`): a program has one head of one sequence, and its state never
  leaves the chip, but in backward. For enough heads and sequences that every multiprocessor has some, and for states that fit
  into registers: there both passes take 2.6 ms, with all chunks at once 3.6 (docs/performance-log.md, entry 16).
- All chunks at once (`scan_states.py`, `scan_outputs.py`, `chunk_scan_grads.py`): chunk states and state passing first, then the chunk
  scan, or the gradients, of all chunks.

Device memory traffic in bf16, Mamba-2 2.7B (S 4096, B 8, H 80, P 64, G 1, N 128), at 4.0 TB/s; x, and y, are 335 MB; states of 64 tokens
each count twice. What the kernels took on an H200:

| step of a sequential scan  | tensors as large as x                                      | ms    | taken |
|----------------------------|------------------------------------------------------------|-------|-------|
| forward                    | x, y                                                       | 0.17  | 0.56  |
| backward, states           | x, states                                                  | 0.25  | 0.30  |
| backward, in reverse       | gradients of y, of x and of states                         | 0.34  | 0.67  |
| backward, intra-chunk      | x, gradient of y                                           | 0.17  | 0.39  |
| backward, inter-chunk      | x, gradient of y, states and their gradients               | 0.50  | 0.60  |

S sequence, B batch, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from petatron.kernels.ssm.chunk_scan import ScanGrads
from petatron.kernels.ssm.chunked_sequence import ChunkOptions
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm import sequential_scan
from petatron.kernels.triton.ssm.chunk_scan_grads import chunk_grads
from petatron.kernels.triton.ssm.scan_outputs import chunk_outputs
from petatron.kernels.triton.ssm.scan_states import chunk_states
from petatron.kernels.triton.ssm.scan_tiles import chunk_cumsum, chunk_tokens
from petatron.kernels.triton.ssm.sequential_scan_coefficient_grads import B_C_D_grads, dt_A_grads

_MIN_PROGRAMS = 256
"""Sequences times heads from which on each is one program: two for every multiprocessor of an H100 or H200."""
_ALIGNED_BYTES = 16
_HOPPER = (9, 0)


def chunk_scan(*scan_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, D_H = scan_inputs
    initial_state = options.get("initial_state")
    x, B, C = (contiguous_rows(tensor) for tensor in (x_SBHP, B_SBGN, C_SBGN))
    decays = chunk_cumsum(dt_SBH, A_H, options.get("starts_SB"), chunk_tokens(options["chunk_size"], B))
    if _is_sequential(x, B, C):
        return sequential_scan.scan_forward(x, B, C, D_H, decays, initial_state)
    states, final_state = chunk_states(x, B, decays, initial_state, reverse=False)
    return chunk_outputs(x, B, C, D_H, decays, states), final_state


def chunk_scan_backward(
    grad_y_SBHP: Tensor, grad_final_state: Tensor | None, *scan_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> ScanGrads:
    """See the reference; `chunk_size` is an upper bound."""
    x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, D_H = scan_inputs
    initial_state = options.get("initial_state")
    x, B, C, grad_y = (contiguous_rows(tensor) for tensor in (x_SBHP, B_SBGN, C_SBGN, grad_y_SBHP))
    decays = chunk_cumsum(dt_SBH, A_H, options.get("starts_SB"), chunk_tokens(options["chunk_size"], B))
    if _is_sequential(x, B, C, grad_y):
        states = sequential_scan.sequential_states(x, B, D_H, decays, initial_state)
        grad_x, grad_states, grad_initial_state = sequential_scan.scan_reverse(
            grad_y, B, C, D_H, decays, grad_final_state
        )
        grad_B, grad_C, grad_D, cumsum_grads = B_C_D_grads(grad_y, x, B, C, decays, states, grad_states)
        grad_dt, grad_A = dt_A_grads(A_H, decays, cumsum_grads, length=len(x))
    else:
        states, _ = chunk_states(x, B, decays, initial_state, reverse=False)
        grad_states, grad_initial_state = chunk_states(grad_y, C, decays, grad_final_state, reverse=True)
        grad_x, grad_dt, grad_A, grad_B, grad_C, grad_D = chunk_grads(
            grad_y, x, A_H, B, C, D_H, decays, states, grad_states
        )
    return (
        grad_x,
        grad_dt.to(dt_SBH.dtype),
        grad_A.to(A_H.dtype),
        grad_B.to(B_SBGN.dtype),
        grad_C.to(C_SBGN.dtype),
        grad_D.to(D_H.dtype),
        None if initial_state is None else grad_initial_state.to(initial_state.dtype),
    )


def _is_sequential(x_SBHP: Tensor, B_SBGN: Tensor, *others: Tensor) -> bool:
    """Returns whether every head of every sequence is one program: on GPUs that copy tiles by themselves."""
    hopper = x_SBHP.is_cuda and torch.cuda.get_device_capability(x_SBHP.device) >= _HOPPER
    return hopper and _fits_sequential_scan(x_SBHP, B_SBGN, *others)


def _fits_sequential_scan(x_SBHP: Tensor, B_SBGN: Tensor, *others: Tensor) -> bool:
    """Returns whether there are enough programs, their states have the size of a tile, and tiles begin at multiples of 16 bytes."""
    _, batch, heads, head_dim = x_SBHP.shape
    sizes = ((head_dim, sequential_scan.MAX_HEAD_DIM), (B_SBGN.shape[3], sequential_scan.MAX_STATE_DIM))
    return (
        x_SBHP.itemsize == 2
        and batch * heads >= _MIN_PROGRAMS
        and all(16 <= size <= limit and size.bit_count() == 1 for size, limit in sizes)
        and all(_aligned(tensor) for tensor in (x_SBHP, B_SBGN, *others))
    )


def _aligned(tensor: Tensor) -> bool:
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return all(offset % _ALIGNED_BYTES == 0 for offset in (tensor.data_ptr(), *strides))
