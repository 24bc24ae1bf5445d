"""ALiBi's biases and the attention temperature: ways in which positions enter attention besides rope.

**ALiBi** (Press et al.) adds -m_h (i - j) to the score of query i and key j, with a slope m_h per head. A softmax does not notice what
all its scores have in common, so m_h j is enough, and that is a product of two more channels of the head:

    (q, m_h) . (k, j) = q . k + m_h j

So every attention kernel, ring, page and mask computes it without knowing. Half precision has 8 bits for an integer, so j is two
channels, j = 256 a + b, and exact up to 65,536. Heads become 8 channels wider, to stay a multiple of 8; the others are zero.

**Temperature** (Llama 4, after Nakanishi's scalable softmax): queries at position p are multiplied by
1 + scale log(1 + floor((p + 1) / floor)), so that attention over long contexts stays sharp.

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.size_limits import ALIBI_RADIX
from petatron.layers.parallel_slots import TensorRank, TensorSlot

ALIBI_CHANNELS = 8
"""By which heads become wider."""


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """The factor on queries of layers without positions."""

    scale: float
    floor: int

    def apply(self, q_SBHE: Tensor, positions: Tensor) -> Tensor:
        dtype = compute_dtype(q_SBHE.dtype)
        steps = ((positions + 1) // self.floor).to(dtype)
        factor = by_token(torch.log1p(steps) * self.scale + 1.0)
        return (q_SBHE * factor).to(q_SBHE.dtype)


def by_token(of_positions: Tensor) -> Tensor:
    """Views one number per position, [S] or [B, S], as [S, 1 or B, 1, 1]."""
    rows = of_positions.unsqueeze(1) if of_positions.dim() == 1 else of_positions.t()
    return rows[..., None, None]


def l2_norm(x_SBHE: Tensor, eps: float) -> Tensor:
    """Divides each head by its root mean square."""
    wide = x_SBHE.to(compute_dtype(x_SBHE.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_SBHE.dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head: a geometric sequence; for another number than a power of two, that of the power below, and then
    every second one of the power above.

    >>> alibi_slopes(2), [round(slope, 3) for slope in alibi_slopes(3)]
    ([0.0625, 0.00390625], [0.062, 0.004, 0.25])
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    more = [2.0 ** (-4.0 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return slopes + more[: num_heads - below]


class AlibiBias(nn.Module):
    """Widens queries and keys by the channels whose product is the bias, for this rank's heads."""

    tensor_slots: Mapping[str, TensorSlot] = {"tensor_rank": "tensor rank"}

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tensor_rank: TensorRank = (0, 1)

    @property
    def heads(self) -> range:
        """The numbers of this rank's heads."""
        rank, num_ranks = self.tensor_rank
        count = self.num_heads // num_ranks
        return range(rank * count, (rank + 1) * count)

    def widen(self, q_SBHE: Tensor, k_SBKE: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns wider heads; queries are scaled so that scores over the square root of the wider head are what they were."""
        width, heads = q_SBHE.shape[-1] + ALIBI_CHANNELS, self.heads
        slopes = torch.tensor(alibi_slopes(self.num_heads), dtype=torch.float64)[heads.start : heads.stop]
        slopes = (slopes * math.sqrt(width)).to(q_SBHE.device, non_blocking=True)
        q_more = q_SBHE.new_zeros(len(heads), ALIBI_CHANNELS)
        q_more[:, 0], q_more[:, 1] = slopes * ALIBI_RADIX, slopes
        at = by_token(positions)
        k_more = torch.cat((at // ALIBI_RADIX, at % ALIBI_RADIX), dim=-1).to(k_SBKE.dtype)
        k_more = torch.nn.functional.pad(k_more, (0, ALIBI_CHANNELS - 2))
        q = q_SBHE * math.sqrt(width / q_SBHE.shape[-1])
        return (
            torch.cat((q, q_more.expand(*q.shape[:-1], -1)), dim=-1),
            torch.cat((k_SBKE, k_more.expand(*k_SBKE.shape[:-1], -1)), dim=-1),
        )
