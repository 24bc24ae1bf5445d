"""Rotary position embedding (Su et al., RoFormer), with two context extensions.

Pair i of a head is rotated by the angle position x f_i with f_i = base^(-2i/n). A context longer than the one trained on has
angles the model never saw; both extensions slow down the low frequencies and keep the high ones:

- Llama 3 divides f_i by `factor` where the wavelength 2 pi / f_i is longer than original / low_freq_factor, keeps it where
  it is shorter than original / high_freq_factor, and interpolates linearly in between.
- YaRN (Peng et al.) does the same with a ramp over the pair index, between the pairs that make beta_slow and beta_fast
  rotations over the original context, and scales cos and sin by a temperature 0.1 mscale ln(factor) + 1.

Halves are rotated, not neighbours: pair i is (x_i, x_{i + n/2}), the convention of Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig


def inverse_frequencies(config: ModelConfig, rotary_dim: int) -> Tensor:
    """Returns f_i for `rotary_dim`, scaled as the config says; float32 on the CPU."""
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")
    plain = config.rotary_base ** -(pairs / rotary_dim)
    if config.position_embedding_type == "yarn":
        return _yarn(plain, config, rotary_dim)
    return _llama3(plain, config) if config.use_rope_scaling else plain


def _llama3(inv_freq: Tensor, config: ModelConfig) -> Tensor:
    rotations = config.original_max_position_embeddings * inv_freq / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / config.rope_scaling_factor)


def _yarn(inv_freq: Tensor, config: ModelConfig, rotary_dim: int) -> Tensor:
    def pair_with(rotations: float) -> float:
        context = config.original_max_position_embeddings
        return rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    low = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with(config.yarn_beta_slow)), rotary_dim - 1)
    index = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1.0 - ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / config.rope_scaling_factor)


def attention_scaling(config: ModelConfig) -> float:
    """Returns the factor on cos and sin: 1 but for YaRN."""
    if config.position_embedding_type != "yarn" or config.rope_scaling_factor <= 1.0:
        return 1.0
    log_scale = 0.1 * math.log(config.rope_scaling_factor)
    return (log_scale * config.yarn_mscale + 1.0) / (log_scale * config.yarn_mscale_all_dim + 1.0)


class RotaryEmbedding(nn.Module):
    """Computes cos and sin of the angles of positions: [S] or [B, S] to two of [S, 1 or B, 1, rotary_dim]."""

    def __init__(self, config: ModelConfig, head_dim: int) -> None:
        super().__init__()
        self.rotary_dim = int(head_dim * config.rotary_percent)
        self.attention_scaling = attention_scaling(config)
        self.inv_freq = inverse_frequencies(config, self.rotary_dim)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.inv_freq.device != positions.device:  # once: the table follows the activations
            self.inv_freq = self.inv_freq.to(positions.device)
        rows = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
        angles = rows.to(torch.promote_types(dtype, torch.float32)).unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)
