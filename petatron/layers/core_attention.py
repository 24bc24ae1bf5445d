"""`CoreAttention`, attention between the projections: softmax attention of queries over the keys and values that a token sees.

S sequence, B batch, H query heads, K kv heads, E head dim; H and K count the heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from petatron.kernels.attention import attention, gather_scatter_rows, key_interval_attention
from petatron.kernels.attention.key_interval_attention import KeyIntervalKernels
from petatron.kernels.attention.packed_document_attention import PackingKernels
from petatron.kernels.attention.score_modifiers import ScoreRules
from petatron.kernels.attention.visibility import Visibility
from petatron.layers.parallel_slots import ContextSlot

AttentionOp = Callable[..., Tensor]
"""Attention over sequences that are whole, or that context-parallel ranks share; called as `kernels/attention`'s `attention` is."""


class CoreAttention(nn.Module):
    """Softmax attention of this rank's heads. `attend` is the slot of context parallelism."""

    context_slots: Mapping[str, ContextSlot] = {"attend": "attention"}

    def __init__(self, *, dropout: float, softcap: float | None = None) -> None:
        super().__init__()
        self.dropout = dropout
        self.softcap = softcap
        self.packing_kernels: PackingKernels = gather_scatter_rows
        self.interval_kernels: KeyIntervalKernels = key_interval_attention
        self.attend: AttentionOp = attention

    def kernel_slots(self) -> Mapping[str, str]:
        return {"packing_kernels": "packed documents", "interval_kernels": "attention of key intervals"}

    def forward(
        self,
        q_SBHE: Tensor,
        k_SBKE: Tensor,
        v_SBKE: Tensor,
        visibility: Visibility,
        sinks_H: Tensor | None = None,
        bias_HD: Tensor | None = None,
    ) -> Tensor:
        """Attends to what a token sees of a batch; sinks and biases are those of `ScoreRules`."""
        ruled = self.softcap is not None or sinks_H is not None or bias_HD is not None
        return self.attend(
            q_SBHE,
            k_SBKE,
            v_SBKE,
            visibility,
            dropout=self.dropout if self.training else 0.0,
            packing_kernels=self.packing_kernels,
            interval_kernels=self.interval_kernels,
            rules=ScoreRules(self.softcap, sinks_H, bias_HD) if ruled else None,
        )


class AttentionSinks(nn.Module):
    """The learned score of each head for attending to nothing."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))
