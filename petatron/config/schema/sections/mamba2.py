"""The settings of Mamba-2 layers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import Factor, PositiveFactor, SequenceLength, Size, Width
from petatron.config.schema.sections.hybrid import MAMBA, all_symbols, branch_symbols
from petatron.config.schema.setting_metadata import Feature, ToySize, UsedWhen, settings_section

MAMBA_CONV_WIDTH = 4
"""Tokens that the convolution of every published Mamba-2 sees."""
_NORM = UsedWhen(lambda run: run.model.mamba_gated_norm != "none", "--mamba-gated-norm none has no norm")


@settings_section
class Mamba2Settings:
    """Mamba-2."""

    feature: ClassVar = Feature(
        "Mamba-2",
        (UsedWhen(lambda run: MAMBA in branch_symbols(all_symbols(run.model)), "no layer is Mamba-2"),),
        recompute_modules=("mamba",),
        offload_modules=("mamba",),
    )
    mamba_state_dim: Annotated[Size, ToySize(16)] = 128
    """Mamba-2: width of the state of each channel."""
    mamba_head_dim: Annotated[Size, ToySize(16)] = 64
    """Mamba-2: width of a head."""
    mamba_num_groups: Annotated[Size, ToySize(8)] = 8
    """Mamba-2: groups of heads that share the inputs and outputs of their states (B and C)."""
    mamba_num_heads: Annotated[Size, ToySize(16)] | None = None
    """Mamba-2: number of heads. Derived: 2 x hidden size / head width."""
    mamba_norm_groups: Annotated[Width, ToySize(8), _NORM] | None = None
    """Mamba-2: groups of channels that the gated norm normalizes, `--mamba-num-groups` or 1. Derived: the former."""
    mamba_chunk_size: Annotated[SequenceLength, "at least 1", ToySize(32), "runtime"] = 128
    """Mamba-2: tokens of a chunk of the scan; of speed and memory only."""
    mamba_gated_norm: Annotated[Literal["gate_then_norm", "norm_then_gate", "none"], "variant"] = "gate_then_norm"
    """Mamba-2: the norm of the scan's output y, which z gates in any case: norm(y silu(z)), norm(y) silu(z), or with none y silu(z), gated
    without a norm (Falcon-H1)."""
    ssm_in_multiplier: Annotated[PositiveFactor, "variant"] = 1.0
    """Factor on all of Mamba-2's first projection (Falcon-H1, where it is one on its input)."""
    ssm_multipliers: tuple[Annotated[Factor, "variant"], ...] = (1.0,) * 5
    """Factors on the parts of Mamba-2's first projection, besides `--ssm-in-multiplier`: z, x, B, C and dt (Falcon-H1)."""
    ssm_out_multiplier: Annotated[PositiveFactor, "variant"] = 1.0
    """Factor on what Mamba-2 adds to the residual stream (Falcon-H1)."""
