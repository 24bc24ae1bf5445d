"""The settings of number formats: half precision, loss scaling, FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from petatron.config.schema.numeric_bounds import (
    IterationCount,
    LayerCount,
    LossScale,
    SmallCount,
)
from petatron.config.schema.parallel import HAS_REPLICAS
from petatron.config.schema.setting_metadata import Feature, settings_section, used_with

_DELAYED = used_with("precision.fp8_recipe", value="delayed")
_FIRST_LAST = used_with("precision.first_last_layers_bf16")


@settings_section
class LossScaleSettings:
    """Loss scaling, for fp16."""

    feature: ClassVar = Feature("loss scaling", (used_with("precision.fp16"),), role="runtime")
    loss_scale: Annotated[LossScale, "above 0"] | None = None
    """Constant loss scale for fp16; unset means dynamic."""
    initial_loss_scale: LossScale = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: Annotated[LossScale, "above 0"] = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: Annotated[IterationCount, "at least 1"] = 1000
    """Clean steps after which the dynamic loss scale doubles."""
    hysteresis: Annotated[SmallCount, "at least 1"] = 2
    """Overflowing steps before the dynamic loss scale halves."""


@settings_section
class Fp8Settings:
    """GEMMs in FP8."""

    feature: ClassVar = Feature("FP8", (used_with("precision.fp8_format"),), role="runtime")
    fp8_format: Annotated[Literal["e4m3", "hybrid"], "selects"] | None = None
    """Run GEMMs in FP8; hybrid uses e5m2 for gradients."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] = "tensorwise"
    """How the scales of `--fp8-format` are chosen: per tensor from the amax of past steps, per tensor, per row, per block of 128, or per 32
    elements of a row with scales of eight bits, for Blackwell."""
    fp8_amax_history_len: Annotated[SmallCount, "at least 1", _DELAYED] = 1
    """Steps in the amax history of the delayed recipe."""
    fp8_amax_compute_algo: Annotated[Literal["most_recent", "max"], _DELAYED] = "most_recent"
    """Which amax of its history the delayed recipe uses: the last, or the largest."""
    fp8_param_gather: Annotated[bool, HAS_REPLICAS] = False
    """All-gather weights of FP8 GEMMs over data-parallel ranks in FP8, half the bytes; no FP8 GEMM changes."""
    fp8_output_head_backward: bool = False
    """Run the two GEMMs of the output head's backward in FP8 too; its logits stay in bf16."""
    first_last_layers_bf16: bool = False
    """Keep some of the first and last layers out of FP8."""
    num_layers_at_start_in_bf16: Annotated[LayerCount, "at least 0", _FIRST_LAST] = 1
    """How many of the first, with `--first-last-layers-bf16`."""
    num_layers_at_end_in_bf16: Annotated[LayerCount, "at least 0", _FIRST_LAST] = 1
    """How many of the last, with `--first-last-layers-bf16`."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(LossScaleSettings, Fp8Settings):
    """Number formats."""

    fp16: bool = False
    """Compute in float16 with loss scaling."""
    bf16: bool = False
    """Compute in bfloat16."""
    fp64: bool = False
    """Compute and keep everything in float64; for proofs on small models."""
