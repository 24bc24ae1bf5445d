"""What the tables of vision encoders have in common: sizes and activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.sections.mlp import ActivationName
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import PLAIN


def plain_activation(config: Translation, setting: str, key: str, default: str) -> None:
    activation(config, setting, key, default, PLAIN)


def activation(config: Translation, setting: str, key: str, default: str, names: Mapping[str, ActivationName]) -> None:
    written = {ours: theirs for theirs, ours in reversed(list(names.items()))}

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        name = keys[key]
        if isinstance(name, str) and name in names:
            return {setting: names[name]}, []
        rule = f"is not one of {', '.join(names)}"
        return {}, [Problem(key, f"{name!r:.40}", rule, OTHER_MODEL_FIX)]

    config.convert(
        {setting: key}, read, lambda spec: {key: written.get(getattr(spec.config, setting))}, **{key: default}
    )
    config.expect(setting, ", ".join(written), lambda spec: getattr(spec.config, setting) in written)


def vision_sizes(config: Translation, defaults: Mapping[str, tuple[str, Any]]) -> None:
    for setting, (key, default) in defaults.items():
        config.copy(setting, key, default, needed=True)


def square_patches(config: Translation, *, image_size: int, patch_size: int) -> None:
    vision_sizes(
        config, {"vision_image_size": ("image_size", image_size), "vision_patch_size": ("patch_size", patch_size)}
    )
    config.only(num_channels=3)
