"""The settings of multi-token prediction."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from petatron.config.schema.numeric_bounds import Factor, LayerCount
from petatron.config.schema.setting_metadata import ComparedAs, Feature, ToySize, UsedWhen, settings_section

_IN_HYBRIDS = UsedWhen(lambda run: run.model.hybrid_layer_pattern is not None, "it is for --hybrid-layer-pattern")


def layers_per_depth(model: Any) -> int:
    """Returns the layers of one depth: one, or in a hybrid as many as its pattern has."""
    return 1 if model.hybrid_layer_pattern is None else len(model.mtp_hybrid_override_pattern or "")


def num_prediction_layers(model: Any) -> int:
    """Returns the layers after the last one that depths have together; repeated ones are counted once."""
    depths = max(model.mtp_num_layers or 0, 0)
    return layers_per_depth(model) * (min(depths, 1) if model.mtp_use_repeated_layer else depths)


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
    mtp_hybrid_override_pattern: Annotated[str, "later", _IN_HYBRIDS] | None = None
    """Multi-token prediction of hybrids: the layers of each depth, one symbol each, as in `--hybrid-layer-pattern`; there they may
    follow a / for each depth, which gives their number too."""
    mtp_use_repeated_layer: Annotated[bool, "later"] = False
    """Multi-token prediction: all depths share the weights of one, which predicts from its own hidden states for each further token."""
