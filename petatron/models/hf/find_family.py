"""Finds the Hugging Face family that a config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.models.hf.families import FAMILIES as ALL_FAMILIES
from petatron.models.hf.family import Family

FAMILIES: Mapping[str, Family] = {family.name: family for family in ALL_FAMILIES}


def get_family(name: str) -> Family:
    """Returns the tables of a family."""
    name = next((family.name for family in ALL_FAMILIES if name in family.other_names), name)
    if name not in FAMILIES:
        raise ConfigError([_unknown_family(name)])
    return FAMILIES[name]


def family_name_of_config(config: Mapping[str, Any]) -> str:
    """Returns the family that the content of a config.json names.

    >>> family_name_of_config({"model_type": "qwen3"})
    'qwen3'
    """
    return get_family(str(config.get("model_type", ""))).name


def _unknown_family(name: str) -> Problem:
    known = ", ".join(FAMILIES)
    rule = "is not a family this version can read or write" if name else "is missing"
    return Problem("model_type", f'"{name}"' if name else "", rule, f"Families: {known}.")
