"""Translates which layers have no rotary positions: `no_rope_layers` of config.json.

Against its name, a 1 in `no_rope_layers` means that the layer has rotary positions.
"""

from __future__ import annotations

from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import format_layers, no_rope_layers
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings
from petatron.models.model_spec import ModelSpec


def rotary_layers(keys: Keys) -> Any:
    """Returns 1 for each layer with rotary positions and 0 for each without: `no_rope_layers`, else what `no_rope_layer_interval` says."""
    every = keys["no_rope_layer_interval"]
    if keys["no_rope_layers"] is not None:
        return keys["no_rope_layers"]
    return [int(every < 1 or (layer + 1) % every != 0) for layer in range(keys["num_hidden_layers"])]


def read_no_rope(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Reads which layers have no positions."""
    rotates, num_layers = rotary_layers(keys), keys["num_hidden_layers"]
    if not isinstance(rotates, list) or len(rotates) != num_layers or any(bit not in (0, 1) for bit in rotates):
        rule = f"is not one 0 or 1 for each of the {num_layers} layers"
        return {}, [Problem("no_rope_layers", f"{rotates!r:.40}", rule, OWN_FOLDER_FIX)]
    return {} if all(rotates) else {"no_rope_freq": format_layers([not bit for bit in rotates])}, []


def write_no_rope(spec: ModelSpec) -> Settings:
    """Returns `no_rope_layers`."""
    return {"no_rope_layers": [int(not here) for here in no_rope_layers(spec.config)]}
