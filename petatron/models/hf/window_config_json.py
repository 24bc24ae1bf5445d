"""Converts which layers have a sliding window: `sliding_window`, `use_sliding_window`, `max_window_layers` and `layer_types`.

Mistral has a window in every layer; Qwen in those from `max_window_layers` on; others in all but every n-th. `layer_types` names the
kind of every layer, and counts if it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.layer_patterns import format_layers, window_layers
from petatron.config.schema.model import ModelConfig
from petatron.models.hf.family import OWN_FOLDER_FIX, Family

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_from_hf_config(
    family: Family, hf_config: Mapping[str, Any], num_layers: int
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns ModelConfig values, and what the decoder cannot express."""
    if "sliding_window" not in family.defaults:
        return {}, []
    window = hf_config["sliding_window"]
    if "use_sliding_window" in family.defaults and not hf_config["use_sliding_window"]:
        window = None
    kinds = (hf_config.get("layer_types") if "layer_types" in family.defaults else None) or _default_types(
        family, hf_config, num_layers, window
    )
    if kinds is None:
        rule = "is missing, and a sliding window in some layers cannot be told from one in all"
        return {}, [Problem("layer_types", "", rule, "Name the kind of every layer in config.json.")]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        return {}, [
            Problem("layer_types", "", f"does not name the kind of each of the {num_layers} layers", OWN_FOLDER_FIX)
        ]
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown:
        rule = f"is none of the kinds that a {family.name} model has here: {FULL}, {SLIDING}"
        return {}, [Problem("layer_types", unknown[0][:40], rule, "Use another model; the decoder has no such part.")]
    slides = [kind == SLIDING for kind in kinds]
    if any(slides) and window is None:
        return {}, [Problem("layer_types", SLIDING, "needs a sliding_window, and there is none", OWN_FOLDER_FIX)]
    if not any(slides):
        return {"window_size": None}, []
    pattern = {} if all(slides) else {"window_attn_skip_freq": format_layers(slides)}
    return {"window_size": window, **pattern}, []


def _default_types(
    family: Family, hf_config: Mapping[str, Any], num_layers: int, window: int | None
) -> list[str] | None:
    """Returns the kinds of layers where config.json does not name them; None if the family has no rule."""
    if window is None:
        return [FULL] * num_layers
    if "max_window_layers" in family.defaults:
        first = hf_config["max_window_layers"]
        return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    every = family.full_attention_every
    if every is not None:
        every = hf_config.get("sliding_window_pattern") or every
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    named = "layer_types" in family.defaults and "use_sliding_window" in family.defaults
    return None if named else [SLIDING] * num_layers


def windows_to_hf_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of windows that the family has."""
    slides = window_layers(model)
    # Where kinds of layers alone say which have a window, transformers builds its mask even for none.
    needed = "layer_types" in family.defaults and "use_sliding_window" not in family.defaults
    unused = family.defaults.get("sliding_window") if needed else None
    content = {
        "sliding_window": unused if model.window_size is None else model.window_size,
        "use_sliding_window": any(slides),
        "max_window_layers": 0 if any(slides) else model.num_layers,
        "layer_types": [SLIDING if here else FULL for here in slides],
    }
    return {key: value for key, value in content.items() if key in family.defaults}
