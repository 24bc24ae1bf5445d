"""Rotary position embedding (Su et al., RoFormer), with four context extensions.

Pair i of a head is rotated by the angle position x f_i with f_i = base^(-2i/n). A context longer than the one trained on has
angles the model never saw. Linear interpolation divides every frequency by `factor`; the others slow down the low frequencies and
keep the high ones:

- Llama 3 divides f_i by `factor` where the wavelength 2 pi / f_i is longer than original / low_freq_factor, keeps it where
  it is shorter than original / high_freq_factor, and interpolates linearly in between.
- YaRN (Peng et al.) does the same with a ramp over the pair index, between the pairs that make beta_slow and beta_fast
  rotations over the original context, and scales cos and sin by a temperature 0.1 mscale ln(factor) + 1.
- LongRoPE (Ding et al.) divides each f_i by a number that was searched for, one list of them for sequences up to the original context
  and one for longer ones, and scales cos and sin by sqrt(1 + ln(factor) / ln(original)). The length of a sequence so far decides which
  list all its tokens have, so one that grows beyond the original context while text is generated is computed anew.

A token may have several coordinates, such as the row and the column of a patch: each rotates some of the pairs. Their frequencies are those
that these pairs have anyway, or every coordinate has all of them.

Halves are rotated, not neighbors: pair i is (x_i, x_{i + n/2}), the convention of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` channels of a head.

    scaling: how frequencies are slowed down for contexts longer than `original_context`; None: not at all.
    round_ramp: whether YaRN's ramp begins and ends at a pair.
    divisors, long_divisors: what LongRoPE divides each frequency by, in sequences up to the original context and in longer ones.
    attention_factor: its factor on cos and sin.
    axes: how many pairs each coordinate of a token rotates; empty: there is one coordinate, its position.
    frequencies_per_axis: every coordinate has frequencies from the highest on.
    """

    rotary_dim: int
    base: float
    scaling: Literal["linear", "llama3", "yarn", "longrope"] | None = None
    scaling_factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    round_ramp: bool = True
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    attention_factor: float | None = None
    axes: tuple[int, ...] = ()
    frequencies_per_axis: bool = False


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Returns f_i of all pairs, scaled as the spec says; float32 on the CPU."""
    if spec.frequencies_per_axis:
        return torch.cat([inverse_frequencies(_of_one_axis(spec, pairs)) for pairs in spec.axes])
    pairs = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu")
    plain = spec.base ** -(pairs / spec.rotary_dim)
    if spec.scaling == "yarn":
        return _yarn(plain, spec)
    if spec.scaling == "linear":
        return plain / spec.scaling_factor
    if spec.scaling == "longrope":
        return plain / torch.tensor(spec.divisors, dtype=torch.float32, device="cpu")
    return _llama3(plain, spec) if spec.scaling == "llama3" else plain


def _of_one_axis(spec: RopeSpec, pairs: int) -> RopeSpec:
    return replace(spec, rotary_dim=2 * pairs, axes=(), frequencies_per_axis=False)


def _llama3(inv_freq: Tensor, spec: RopeSpec) -> Tensor:
    rotations = spec.original_context * inv_freq / (2 * math.pi)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep = ((rotations - low) / max(high - low, 1e-9)).clamp(0.0, 1.0)  # Llama 4 has no ramp between the two
    return inv_freq * (keep + (1.0 - keep) / spec.scaling_factor)


def _yarn(inv_freq: Tensor, spec: RopeSpec) -> Tensor:
    def pair_with(rotations: float) -> float:
        context = spec.original_context
        return spec.rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.round_ramp:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    index = torch.arange(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
    span = 1e-3 if low == high else high - low  # no ramp: Kimi-K2 has beta_fast = beta_slow
    keep = 1.0 - ((index - low) / span).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / spec.scaling_factor)


def yarn_attention_scaling(factor: float, *, mscale: float, mscale_all_dim: float) -> float:
    """Returns YaRN's factor on cos and sin."""
    if factor <= 1.0:
        return 1.0
    log_scale = 0.1 * math.log(factor)
    return (log_scale * mscale + 1.0) / (log_scale * mscale_all_dim + 1.0)


def longrope_attention_scaling(factor: float, original_context: int) -> float:
    """Returns LongRoPE's factor on cos and sin."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_context))


def attention_scaling(spec: RopeSpec) -> float:
    """Returns the factor on cos and sin."""
    if spec.scaling == "yarn":
        return yarn_attention_scaling(spec.scaling_factor, mscale=spec.mscale, mscale_all_dim=spec.mscale_all_dim)
    if spec.scaling != "longrope":
        return 1.0
    given = spec.attention_factor
    return longrope_attention_scaling(spec.scaling_factor, spec.original_context) if given is None else given


def pairs_apart(x: Tensor, rotary_dim: int) -> Tensor:
    """Moves pairs of neighboring channels half of `rotary_dim` apart, where rope rotates them.

    Scores do not notice that queries and keys have another order of channels, if it is the same, so nothing is moved back.
    """
    rotary, others = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((rotary[..., ::2], rotary[..., 1::2], others), dim=-1)


def split_long_marks(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions, and which of them are of a sequence beyond the original context: a step of generation has ~p for p then.

    >>> [x.tolist() for x in split_long_marks(torch.tensor([3, ~5]))]
    [[3, 5], [False, True]]
    """
    is_long = positions < 0
    return torch.where(is_long, ~positions, positions), is_long


class RotaryEmbedding(nn.Module):
    """Computes cos and sin of the angles of positions: [S] or [B, S] to two of [S, 1 or B, 1, rotary_dim].

    With several coordinates positions are [B, axes, S]; a token of text, whose coordinates are equal, may have one.

    `is_long`: whether sequences are beyond the original context, which LongRoPE asks: all, or by [S or 1, B or 1].
    """

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attention_scaling = attention_scaling(spec)
        self.inv_freq = self.long_inv_freq = inverse_frequencies(spec)
        self.axis_of_pair = torch.tensor(
            [axis for axis, pairs in enumerate(spec.axes) for _ in range(pairs)], device="cpu"
        )
        if spec.long_divisors:
            self.long_inv_freq = inverse_frequencies(replace(spec, divisors=spec.long_divisors))

    def forward(
        self, positions: Tensor, dtype: torch.dtype, *, is_long: Tensor | bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.inv_freq.device != positions.device:  # once: the table follows the activations
            self.inv_freq = self.inv_freq.to(positions.device)
            self.long_inv_freq = self.long_inv_freq.to(positions.device)
            self.axis_of_pair = self.axis_of_pair.to(positions.device)
        if not isinstance(is_long, bool) and self.spec.long_divisors:
            inv_freq = torch.where(is_long.unsqueeze(-1), self.long_inv_freq, self.inv_freq)
        else:
            inv_freq = self.long_inv_freq if is_long is True else self.inv_freq
        angles = self._of_pairs(positions).to(torch.promote_types(dtype, torch.float32)) * inv_freq
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)

    def _of_pairs(self, positions: Tensor) -> Tensor:
        """Returns the coordinate that rotates each pair, [S, 1 or B, pairs], or one for all pairs."""
        if positions.dim() == 1:
            return positions.view(-1, 1, 1)
        if positions.dim() == 2:
            return positions.t().unsqueeze(-1)
        return positions.permute(2, 0, 1).index_select(2, self.axis_of_pair)
