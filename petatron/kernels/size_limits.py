"""The sizes that kernels support: heads of attention, FP8 GEMMs by recipe, the grouped GEMM of experts.

Without torch, so that the rules about a config ask here what the kernels ask.
"""

from __future__ import annotations

from typing import Literal

FLASH_HEAD_MULTIPLE, FLASH_MAX_HEAD_DIM = 8, 256
MIN_PADDED_DOCUMENT = 1024
"""The shortest document, in tokens, that goes to the dense kernel, in a layout that the host plans."""
ALIBI_RADIX = 256
MAX_ALIBI_POSITIONS = ALIBI_RADIX**2
"""A position is two digits, each exact in half precision (`layers/alibi_and_temperature.py`)."""
Scaling = Literal["tensorwise", "rowwise", "block_1x128", "block_128x128", "block_1x32"]
SCALINGS: dict[str, Scaling] = {
    "tensorwise": "tensorwise",
    "delayed": "tensorwise",
    "rowwise": "rowwise",
    "blockwise": "block_1x128",
    "mxfp8": "block_1x32",
}
"""The scaling of activations and gradients, by `--fp8-recipe`."""
BLOCK = 128
MX_BLOCK = 32
"""Elements of a row that share a scale in MXFP8."""
FP8_SIZE_MULTIPLE = 16
"""All sizes of an FP8 GEMM are multiples of this, where no scaling needs more."""
GROUPED_WIDTH_MULTIPLE = 8
"""The elements of bfloat16 in the 16 bytes that the grouped kernel copies at a time."""


def flash_supports_heads(head_dim: int) -> bool:
    """Whether FlashAttention, in half precision, takes heads of this width."""
    return head_dim % FLASH_HEAD_MULTIPLE == 0 and head_dim <= FLASH_MAX_HEAD_DIM


def interval_kernel_supports_heads(head_dim: int) -> bool:
    """Whether attention of key intervals has a kernel, in half precision, for heads of this width.

    >>> [width for width in (8, 16, 64, 80, 128, 256) if interval_kernel_supports_heads(width)]
    [16, 64, 128]
    """
    return 16 <= head_dim <= 128 and head_dim & (head_dim - 1) == 0


def fp8_size_multiple(scaling: Scaling) -> int:
    """Returns what all sizes of a GEMM with this scaling are multiples of."""
    return {"block_1x128": BLOCK, "block_1x32": MX_BLOCK}.get(scaling, FP8_SIZE_MULTIPLE)


def grouped_gemm_supports(*widths: int) -> bool:
    """Whether the grouped kernel takes matrices of these widths, in bfloat16."""
    return all(width % GROUPED_WIDTH_MULTIPLE == 0 for width in widths)
