"""One step of the causal convolution: a token of each sequence, after the window that its slot has. The reference.

A window is the last W - 1 inputs of a sequence. It is shifted by the new one in place, so a step reads and writes it once.

B sequences, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.ssm.causal_conv import causal_conv


def conv_step(x_BC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, *, windows: Tensor, slots_B: Tensor) -> Tensor:
    """Returns silu(convolution) [B, C] of one token of each sequence, and takes it into the window of the sequence's slot.

    windows: [slots, W - 1, C].
    """
    x_1BC, window = x_BC.unsqueeze(0), windows.index_select(0, slots_B).transpose(0, 1)
    y_1BC = causal_conv(x_1BC, weight_CW, bias_C, window=window)
    shifted = torch.cat((window, x_1BC))[1:]
    windows.index_copy_(0, slots_B, shifted.transpose(0, 1).to(windows.dtype))
    return y_1BC[0]
