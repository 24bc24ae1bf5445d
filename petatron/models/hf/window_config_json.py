"""Translates which layers have a sliding window: `sliding_window`, `use_sliding_window`, `max_window_layers` and `layer_types`.

Mistral has a window in every layer; Qwen in those from `max_window_layers` on; others in all but every n-th. `layer_types` names the
kind of every layer, and counts if it is there.
"""

from __future__ import annotations

from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.attention_layer_freq import format_layers, window_layers
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.model_spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(
    config: Translation, sliding_window: int | None, *, full_attention_every: int | None = None, **keys: Any
) -> None:
    """Translates windows by `sliding_window` and the other keys that the family has, each with its default.

    full_attention_every: every n-th layer has no window where `layer_types` does not say which.
    """
    keys["sliding_window"] = sliding_window
    settings = ("window_size", "window_attn_skip_freq")[: 1 + ("layer_types" in keys)]
    config.convert(
        settings,
        lambda given: _read(config, {key: given[key] for key in keys} | _pattern(given, full_attention_every)),
        lambda spec: _write(spec, keys),
        **keys,
    )


def _pattern(keys: Keys, every: int | None) -> Settings:
    return {} if every is None else {"every": keys.get("sliding_window_pattern") or every}


def _read(config: Translation, keys: Keys) -> tuple[Settings, list[Problem]]:
    """`keys` are those that the family has, and `every`, where every so many-th layer has no window."""
    num_layers = config.setting("num_layers")
    window = keys["sliding_window"] if keys.get("use_sliding_window", True) else None
    kinds = keys.get("layer_types") or _default_types(keys, num_layers, window)
    if kinds is None:
        rule = "is missing, and a sliding window in some layers cannot be told from one in all"
        return {}, [Problem("layer_types", "", rule, "Name the kind of every layer in config.json.")]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        rule = f"does not name the kind of each of the {num_layers} layers"
        return {}, [Problem("layer_types", "", rule, OWN_FOLDER_FIX)]
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown:
        rule = f"is none of the kinds that a {config.family} model has here: {FULL}, {SLIDING}"
        return {}, [Problem("layer_types", unknown[0][:40], rule, OTHER_MODEL_FIX)]
    slides = [kind == SLIDING for kind in kinds]
    if any(slides) and window is None:
        return {}, [Problem("layer_types", SLIDING, "needs a sliding_window, and there is none", OWN_FOLDER_FIX)]
    if not any(slides):
        return {"window_size": None}, []
    pattern = {} if all(slides) else {"window_attn_skip_freq": format_layers(slides)}
    return {"window_size": window, **pattern}, []


def _default_types(keys: Keys, num_layers: int, window: int | None) -> list[str] | None:
    """Returns the kinds of layers where config.json does not name them; None if the family has no rule."""
    if window is None:
        return [FULL] * num_layers
    if "max_window_layers" in keys:
        return [SLIDING if layer >= keys["max_window_layers"] else FULL for layer in range(num_layers)]
    if "every" in keys:
        return [FULL if (layer + 1) % keys["every"] == 0 else SLIDING for layer in range(num_layers)]
    return None if {"layer_types", "use_sliding_window"} <= keys.keys() else [SLIDING] * num_layers


def _write(spec: ModelSpec, defaults: Keys) -> Settings:
    model, slides = spec.config, window_layers(spec.config)
    # Where kinds of layers alone say which have a window, transformers builds its mask even for none.
    needed = "layer_types" in defaults and "use_sliding_window" not in defaults
    unused = defaults["sliding_window"] if needed else None
    content = {
        "sliding_window": unused if model.window_size is None else model.window_size,
        "use_sliding_window": any(slides),
        "max_window_layers": 0 if any(slides) else model.num_layers,
        "layer_types": [SLIDING if here else FULL for here in slides],
    }
    return {key: value for key, value in content.items() if key in defaults}
