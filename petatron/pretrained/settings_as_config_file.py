"""Writes the settings of a model as sections of a config file, and loads them like a user's file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petatron.config import LoadedConfig
from petatron.validate import load_config

_MAX_DEFAULT_SEQ_LENGTH = 4096


def config_sections(model: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a model's settings as sections of a config file, with a sequence length that it supports unless one is given.

    With LongRoPE the default is the original context, whose samples train with the short factors.
    """
    longest = model.get("max_position_embeddings") or _MAX_DEFAULT_SEQ_LENGTH
    if model.get("longrope_short_factor"):
        longest = min(longest, model.get("original_max_position_embeddings") or longest)
    longest -= model.get("position_offset") or 0
    length = model.get("seq_length") or min(longest, _MAX_DEFAULT_SEQ_LENGTH)
    return {"model": {**model, "seq_length": length}, **({"moe": dict(moe)} if moe else {})}


def config_yaml_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Serializes the sections as a config file; JSON values are YAML."""
    lines = []
    for section, values in sections.items():
        lines += [f"{section}:", *(f"  {name}: {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def load_config_sections(
    sections: Mapping[str, Mapping[str, Any]], flags: Sequence[str] = (), *, world_size: int | None = 1
) -> LoadedConfig:
    """Loads the config of a model from sections: derived and checked like a user's file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_yaml_text(sections))
        return load_config(flags, files=[file], world_size=world_size, require_training=False)
