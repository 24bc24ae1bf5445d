"""Multi-head, grouped-query and multi-query self-attention: one layer, told apart by the number of key/value heads.

S sequence, B batch, D hidden, H query heads, K key/value heads, E head width, as many of each as lie on this device.
"""

from __future__ import annotations

from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig
from petatron.kernels import qk_norm_rope, rope
from petatron.kernels.attention import causal_attention, rows
from petatron.kernels.attention.documents import Documents
from petatron.kernels.attention.padded import RowMoves
from petatron.kernels.rope import split_heads, turn
from petatron.layers.forward_context import Pass
from petatron.layers.linear import Linear
from petatron.layers.norm import RMSNorm, build_norm
from petatron.layers.ops.qkv_split import NormedHeadsKernels, Norms, RotateKernels, split_norm_rotate, split_rotate
from petatron.layers.ops.recompute_output import Remade


class CoreAttention(nn.Module):
    """Softmax attention over heads that are whole on this device; the slot that context parallelism replaces."""

    def __init__(self, *, window: int | None, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout
        self.moves: RowMoves = rows

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, documents: Documents | None = None) -> Tensor:
        return causal_attention(
            q_SBHE,
            k_SBKE,
            v_SBKE,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            documents=documents,
            moves=self.moves,
        )


class Attention(nn.Module):
    """out(attend(q, k, v)); q, k and v are one product, stored as three logical tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.kv_channels is not None and config.num_query_groups is not None
        self.head_width = config.kv_channels
        q_width = config.num_attention_heads * config.kv_channels
        kv_width = config.num_query_groups * config.kv_channels
        self.qkv = Linear(
            config.hidden_size, (q_width, kv_width, kv_width), bias=config.add_bias_linear or config.add_qkv_bias
        )
        self.q_norm = build_norm(config, self.head_width) if config.qk_layernorm else None
        self.k_norm = build_norm(config, self.head_width) if config.qk_layernorm else None
        self.core = CoreAttention(window=config.window_size, dropout=config.attention_dropout)
        self.kernels: RotateKernels = rope
        self.norm_kernels: NormedHeadsKernels = qk_norm_rope
        self.out = Linear(q_width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Remade, passing: Pass) -> Tensor:
        q, k, v = self._heads(self.qkv(x_SBD), passing)
        return self.out(self.core(q, k, v, passing.documents).flatten(-2))

    def _heads(self, qkv: Tensor, passing: Pass) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups, _ = (width // self.head_width for width in self.qkv.sections)
        if passing.rotation is not None and self.q_norm is None:
            return split_rotate(qkv, passing.rotation, heads=heads, groups=groups, kernels=self.kernels)
        if passing.rotation is not None and self.rms_norms is not None:
            sizes = {"heads": heads, "groups": groups}
            return split_norm_rotate(qkv, passing.rotation, self.rms_norms, **sizes, kernels=self.norm_kernels)
        q, k, v = split_heads(qkv, heads=heads, groups=groups)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if passing.rotation is not None:
            q, k = turn(q, *passing.rotation), turn(k, *passing.rotation)
        return q, k, v

    @property
    def rms_norms(self) -> Norms | None:
        """The norms of queries and keys, if they are of the kind that one kernel does together with the rotation."""
        both = isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return (self.q_norm, self.k_norm) if both else None
