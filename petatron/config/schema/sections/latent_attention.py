"""The settings of multi-head latent attention, and what of other attention it excludes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.numeric_bounds import PositiveFactor, Size
from petatron.config.schema.sections.hybrid import HAS_ATTENTION
from petatron.config.schema.setting_metadata import Feature, NotWith, ToySize, UsedWhen, settings_section, used_with

NOT_LATENT = NotWith("multi_latent_attention", rule="cannot be combined with --multi-latent-attention")
LATENT_HEADS = UsedWhen(lambda run: not run.model.multi_latent_attention, "latent attention has head widths of its own")


@settings_section
class LatentAttentionSettings:
    """Multi-head latent attention (DeepSeek)."""

    feature: ClassVar = Feature("latent attention", (used_with("model.multi_latent_attention"),))
    multi_latent_attention: Annotated[bool, "selects", "later", HAS_ATTENTION] = False
    """Multi-head latent attention (DeepSeek): keys and values come from one narrow latent vector per token."""
    q_lora_rank: Annotated[Size, ToySize(48)] | None = None
    """Latent attention: width of the latent that queries come from; unset means that they come from the hidden state."""
    kv_lora_rank: Annotated[Size, ToySize(32)] = 32
    """Latent attention: width of the latent that keys and values come from."""
    qk_head_dim: Annotated[Size, ToySize(16)] = 128
    """Latent attention: width of the part of a query or key head without position."""
    qk_pos_emb_head_dim: Annotated[Size, ToySize(8)] = 64
    """Latent attention: width of the rotary part of a query or key head; all heads share that of the keys."""
    v_head_dim: Annotated[Size, ToySize(16)] = 128
    """Latent attention: width of a value head."""
    latent_norm_epsilon: Annotated[PositiveFactor, "variant", used_with("model.qk_layernorm")] | None = None
    """Latent attention: added to the variance inside the norms of latents (Kimi-Linear). Unset means `--norm-epsilon`."""
