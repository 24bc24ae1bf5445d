"""Tells whether training a model draws random numbers (dropout, jitter), without building it."""

from __future__ import annotations

from petatron.config.schema.run import RawRunConfig


def uses_random_numbers(config: RawRunConfig) -> bool:
    """Whether a training step draws random numbers."""
    experts = config.moe.num_experts is not None
    noisy = bool(config.moe.moe_input_jitter_eps) or config.moe.moe_router_force_load_balancing
    return config.model.hidden_dropout > 0.0 or config.model.attention_dropout > 0.0 or (experts and noisy)
