"""The rotary embedding of a decoder's layers, made from the settings of a model."""

from __future__ import annotations

from petatron.config.schema.longrope_factors import parse_longrope_factors
from petatron.config.schema.model import ModelConfig
from petatron.layers.rope import RopeSpec


def rope_spec(config: ModelConfig, head_dim: int) -> RopeSpec:
    """Returns the rope of heads of a width, scaled as the settings say."""
    yarn = config.position_embedding_type == "yarn"
    interpolation = config.rotary_seq_len_interpolation_factor
    if interpolation is not None and not yarn:
        rotary_dim = int(head_dim * config.rotary_percent)
        return RopeSpec(rotary_dim=rotary_dim, base=config.rotary_base, scaling="linear", scaling_factor=interpolation)
    if config.longrope_short_factor is not None and config.longrope_long_factor is not None:
        return RopeSpec(
            rotary_dim=int(head_dim * config.rotary_percent),
            base=config.rotary_base,
            scaling="longrope",
            scaling_factor=config.rope_scaling_factor,
            original_context=config.original_max_position_embeddings,
            divisors=parse_longrope_factors(config.longrope_short_factor),
            long_divisors=parse_longrope_factors(config.longrope_long_factor),
            attention_factor=config.longrope_attention_factor,
        )
    return RopeSpec(
        rotary_dim=int(head_dim * config.rotary_percent),
        base=config.rotary_base,
        scaling="yarn" if yarn else "llama3" if config.use_rope_scaling else None,
        scaling_factor=config.rope_scaling_factor,
        original_context=config.original_max_position_embeddings,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.yarn_mscale,
        mscale_all_dim=config.yarn_mscale_all_dim,
        round_ramp=config.yarn_correction_range_round_to_int,
    )
