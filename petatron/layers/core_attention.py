"""What attention computes of queries, keys and values, between the projections: softmax attention, causal or in both directions.

S sequence, B batch, H query heads, K kv heads, E head dim; H and K count the heads of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petatron.kernels.attention import causal_attention, full_attention, rows
from petatron.kernels.attention.documents import Documents
from petatron.kernels.attention.padded import PackingKernels
from petatron.kernels.attention.score_rules import ScoreRules


class CoreAttention(nn.Module):
    """Causal softmax attention over whole sequences of this rank's heads; context parallelism replaces this module."""

    def __init__(
        self, *, window: int | None, dropout: float, softcap: float | None = None, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.window, self.chunk = window, chunk
        self.dropout = dropout
        self.softcap = softcap
        self.packing_kernels: PackingKernels = rows

    def kernel_slots(self) -> Mapping[str, str]:
        return {"packing_kernels": "packed documents"}

    def score_rules(self, sinks_H: Tensor | None) -> ScoreRules | None:
        plain = self.softcap is None and sinks_H is None
        return None if plain else ScoreRules(self.softcap, sinks_H)

    def forward(
        self,
        q_SBHE: Tensor,
        k_SBKE: Tensor,
        v_SBKE: Tensor,
        documents: Documents | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        return causal_attention(
            q_SBHE,
            k_SBKE,
            v_SBKE,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            documents=documents,
            packing_kernels=self.packing_kernels,
            rules=None if self.softcap is None and sinks_H is None else self.score_rules(sinks_H),
            chunk=self.chunk,
        )


class BidirectionalCoreAttention(nn.Module):
    """Softmax attention of every token to all of its sequence, over this rank's heads."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, documents: Documents | None = None) -> Tensor:
        assert documents is None, "a spec says that it does not separate documents"
        return full_attention(q_SBHE, k_SBKE, v_SBKE, dropout=self.dropout if self.training else 0.0)


class AttentionSinks(nn.Module):
    """The learned score of each head for attending to nothing."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))
