"""Translates which layers have linear attention: `layer_types` of config.json."""

from __future__ import annotations

from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import format_layers, linear_layers
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Read, Settings, Translation, Write
from petatron.models.hf.window_config_json import FULL
from petatron.models.model_spec import ModelSpec

LINEAR = "linear_attention"


def linear_attention(config: Translation, variant: str, read: Read, write: Write, *settings: str, **keys: Any) -> None:
    """Translates which layers have linear attention, by `read` and `write`, with other `settings` that these convert."""
    frequency = "linear_attention_freq"
    config.always(experimental_attention_variant=variant)
    config.convert((frequency, *settings), read, write, layer_types=None, **keys)
    config.expect(frequency, "always one", lambda spec: spec.config.linear_attention_freq is not None)


def read_linear_layers(kinds: object, num_layers: int) -> list[bool] | Problem:
    """Returns for each layer whether it has linear attention, by `layer_types`."""
    if isinstance(kinds, list) and len(kinds) == num_layers and not {str(kind) for kind in kinds} - {FULL, LINEAR}:
        return [kind == LINEAR for kind in kinds]
    rule = f"does not name each of the {num_layers} layers {FULL} or {LINEAR}"
    return Problem("layer_types", "", rule, OWN_FOLDER_FIX)


def linear_settings(linear: list[bool] | Problem) -> tuple[Settings, list[Problem]]:
    """Returns the setting of layers with linear attention, or what is wrong with them."""
    if isinstance(linear, Problem):
        return {}, [linear]
    return {"linear_attention_freq": format_layers(linear)}, []


def write_linear_layers(spec: ModelSpec) -> Settings:
    """Returns `layer_types` of a model with linear attention."""
    return {"layer_types": [LINEAR if linear else FULL for linear in linear_layers(spec.config)]}
