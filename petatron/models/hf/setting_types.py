"""Checks the types of what a Hugging Face config.json says in numbers and switches, also of keys that are only copied.

A conversion copies config.json with what it does not use, and the next program believes it. JSON has no types of its own: a text where a
number belongs may be skipped, or taken for a number (`"1e6"`) or for true (`"false"`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from petatron.base.errors import Problem
from petatron.base.untrusted_files import MAX_INT64
from petatron.config.schema.fields import fields_by_name
from petatron.models.hf.family import OWN_FOLDER_FIX, Family

SettingType = Literal["whole", "number", "switch", "ids"]
_RULES: Mapping[SettingType, str] = {
    "whole": "is not a whole number",
    "number": "is not a number",
    "switch": "is not true or false",
    "ids": "is not the id of a token, nor a list of them",
}
_STAND_INS: Mapping[SettingType, tuple[Any, Any]] = {
    "whole": (2, 4),
    "number": (1.0, 2.0),
    "switch": (False, True),
    "ids": (0, 1),
}
# Keys that families have in common and no field or default says the type of.
_COMMON: Mapping[str, SettingType] = {
    "num_hidden_layers": "whole",
    "rope_theta": "number",
    "partial_rotary_factor": "number",
    "rope_local_base_freq": "number",
    "original_max_position_embeddings": "whole",
    "sliding_window_pattern": "whole",
    "sliding_window": "whole",
    "router_aux_loss_coef": "number",
    "summary_first_dropout": "number",
    "pretraining_tp": "whole",
    "n_ctx": "whole",
    "bos_token_id": "ids",
    "eos_token_id": "ids",
    "pad_token_id": "ids",
}
# Keys of defaults that are numbers, in which null means nothing; in others it turns something off, or is what sizes give.
_NEEDED = ("query_pre_attn_scalar", "max_window_layers", "no_rope_layer_interval", "attn_scale", "floor_scale")
_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def wrong_types(family: Family, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields every setting of another type than it has; null is an unset one, where there is such."""
    needed = {*_NEEDED, family.keys.get("max_position_embeddings"), family.keys.get("norm_epsilon")}
    for key, kind in _key_types(family).items():
        if key in needed and key in hf_config and hf_config[key] is None:
            yield _problem(key, None, _RULES[kind])
        if not _has_type(hf_config.get(key), kind):
            yield _problem(key, hf_config[key], _RULES[kind])
    for table in _ROPE_TABLES:
        values = hf_config.get(table)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            yield _problem(table, values, "is not a table of settings")
            continue
        nested = {f"{table}.{name}": value for name, value in values.items() if isinstance(value, Mapping)}
        for path, numbers in {table: values, **nested}.items():
            for name in _ROPE_NUMBERS:
                if not _has_type(numbers.get(name), "number"):
                    yield _problem(f"{path}.{name}", numbers[name], _RULES["number"])


def stand_ins(family: Family, keys: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two values of its type for each key, by key; none for tables, and for keys of which no type is known.

    Keys of a hybrid's pattern have one that can be read.
    """
    types = _key_types(family)
    known = [key for key in keys if key in types]
    tables: dict[str, Any] = dict.fromkeys(set(keys) & set(_ROPE_TABLES))
    if family.hybrid is not None:
        tables |= {key: value for key, value in family.hybrid.stand_ins.items() if key in keys}
    first, second = ({key: _STAND_INS[types[key]][number] for key in known} for number in range(2))
    return {**first, **tables}, {**second, **tables}


def _key_types(family: Family) -> dict[str, SettingType]:
    """Returns the type of each key: that of our field, or of transformers' default."""
    by_kind: Mapping[str, SettingType] = {"int": "whole", "float": "number", "bool": "switch"}
    found = dict(_COMMON)
    found |= {
        key: by_kind[type(value).__name__]
        for key, value in family.defaults.items()
        if type(value) in (int, float, bool)
    }
    for ours, key in (*family.keys.items(), *family.moe_keys.items()):
        found[key] = by_kind[fields_by_name()[ours].kind]
    return found


def _has_type(value: object, kind: SettingType) -> bool:
    if value is None:
        return True
    if kind == "ids" and isinstance(value, list):
        return all(_has_type(item, "whole") and item is not None for item in value)
    if kind == "switch" or isinstance(value, bool):
        return kind == "switch" and isinstance(value, bool)
    if isinstance(value, int):
        return -MAX_INT64 <= value <= MAX_INT64
    return kind == "number" and isinstance(value, float) and abs(value) <= sys.float_info.max


def _problem(key: str, value: object, rule: str) -> Problem:
    return Problem(key, f"{value!r:.40}", rule, OWN_FOLDER_FIX)
