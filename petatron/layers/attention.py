"""Multi-head, grouped-query and multi-query self-attention: one layer; the number of kv heads makes the difference.

S sequence, B batch, D hidden, H query heads, K kv heads, E head dim; H and K count the heads of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig
from petatron.kernels import qk_norm_rope, rope
from petatron.kernels.attention import causal_attention, rows
from petatron.kernels.attention.documents import Documents
from petatron.kernels.attention.padded import PackingKernels
from petatron.kernels.rope import apply_rope, split_qkv
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.norm import RMSNorm, build_norm
from petatron.layers.ops.qkv_split import QKNormRopeKernels, QKNorms, RopeKernels, split_qkv_norm_rope, split_qkv_rope
from petatron.layers.ops.recompute_output import Recomputable


class CoreAttention(nn.Module):
    """Softmax attention over whole sequences of this rank's heads; context parallelism replaces this module."""

    def __init__(self, *, window: int | None, dropout: float) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout
        self.packing_kernels: PackingKernels = rows

    def forward(self, q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, documents: Documents | None = None) -> Tensor:
        return causal_attention(
            q_SBHE,
            k_SBKE,
            v_SBKE,
            window=self.window,
            dropout=self.dropout if self.training else 0.0,
            documents=documents,
            packing_kernels=self.packing_kernels,
        )


class Attention(nn.Module):
    """out(core(q, k, v)); q, k and v are one GEMM, stored as three logical tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.kv_channels is not None and config.num_query_groups is not None
        self.head_dim = config.kv_channels
        q_width = config.num_attention_heads * config.kv_channels
        kv_width = config.num_query_groups * config.kv_channels
        self.qkv = Linear(
            config.hidden_size, (q_width, kv_width, kv_width), bias=config.add_bias_linear or config.add_qkv_bias
        )
        self.q_norm = build_norm(config, self.head_dim) if config.qk_layernorm else None
        self.k_norm = build_norm(config, self.head_dim) if config.qk_layernorm else None
        self.core = CoreAttention(window=config.window_size, dropout=config.attention_dropout)
        self.kernels: RopeKernels = rope
        self.qk_norm_rope_kernels: QKNormRopeKernels = qk_norm_rope
        self.out = Linear(q_width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Recomputable, context: ForwardContext) -> Tensor:
        q, k, v = self._split_qkv(self.qkv(x_SBD), context)
        return self.out(self.core(q, k, v, context.documents).flatten(-2))

    def _split_qkv(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups, _ = (width // self.head_dim for width in self.qkv.sections)
        if context.rope_cos_sin is not None and self.q_norm is None:
            return split_qkv_rope(qkv, context.rope_cos_sin, num_heads=heads, num_kv_heads=groups, kernels=self.kernels)
        if context.rope_cos_sin is not None and self.qk_rms_norms is not None:
            sizes = {"num_heads": heads, "num_kv_heads": groups}
            return split_qkv_norm_rope(
                qkv, context.rope_cos_sin, self.qk_rms_norms, **sizes, kernels=self.qk_norm_rope_kernels
            )
        q, k, v = split_qkv(qkv, num_heads=heads, num_kv_heads=groups)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rope_cos_sin is not None:
            q, k = apply_rope(q, *context.rope_cos_sin), apply_rope(k, *context.rope_cos_sin)
        return q, k, v

    @property
    def qk_rms_norms(self) -> QKNorms | None:
        """Returns q-norm and k-norm if both are RMSNorm, which one kernel fuses with rope; else None."""
        both = isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
        return (self.q_norm, self.k_norm) if both else None
