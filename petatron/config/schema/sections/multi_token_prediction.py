"""The settings of multi-token prediction."""

from __future__ import annotations

from typing import Annotated, ClassVar

from petatron.config.schema.metadata import ComparedAs, Feature, ToySize, UsedWhen, settings_section
from petatron.config.schema.numeric_bounds import Factor, LayerCount


@settings_section
class MultiTokenPredictionSettings:
    """Multi-token prediction (DeepSeek-V3)."""

    feature: ClassVar = Feature(
        "multi-token prediction", (UsedWhen(lambda run: run.model.mtp_num_layers, "it is for --mtp-num-layers"),)
    )
    mtp_num_layers: (
        Annotated[LayerCount, ToySize(1), "selects", ComparedAs(lambda depths, _: depths or None)] | None
    ) = None
    """Multi-token prediction (DeepSeek-V3): layers after the last one, each of which predicts one token further ahead; unset or 0: none."""
    mtp_loss_scaling_factor: Annotated[Factor, "at least 0"] = 0.1
    """Weight of the mean of their losses, beside that of the next token."""
