"""Checks the types of values in a Hugging Face config.json, also of keys that are only copied.

A conversion copies config.json with what it does not use, and the next program believes it. JSON has no types of its own: a text where a
number belongs may be skipped, or taken for a number (`"1e6"`) or for true (`"false"`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from petatron.base.errors import Problem
from petatron.base.untrusted_files import MAX_INT64

OWN_FOLDER_FIX = "Take config.json from the model's own folder."
"""What helps where a config.json says what no model of its family does."""
SettingType = Literal["whole", "number", "switch", "ids"]
TYPES: Mapping[str, SettingType] = {"int": "whole", "float": "number", "bool": "switch"}
"""By the name of Python's type, which is also that of a field's kind."""
_RULES: Mapping[SettingType, str] = {
    "whole": "is not a whole number",
    "number": "is not a number",
    "switch": "is not true or false",
    "ids": "is not the id of a token, nor a list of them",
}
STAND_INS: Mapping[SettingType, tuple[Any, Any]] = {
    "whole": (2, 4),
    "number": (1.0, 2.0),
    "switch": (False, True),
    "ids": (0, 1),
}
"""Two values of a type, for keys of which the value is not known."""
_COUNT_KEYS = ("num_hidden_layers", "original_max_position_embeddings", "sliding_window_pattern", "sliding_window")
_NUMBER_KEYS = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq", "router_aux_loss_coef")
COMMON: Mapping[str, SettingType] = {
    **dict.fromkeys((*_COUNT_KEYS, "pretraining_tp", "n_ctx"), "whole"),
    **dict.fromkeys((*_NUMBER_KEYS, "summary_first_dropout"), "number"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "ids"),
}
"""Keys that families have in common and no field or default says the type of."""
ROPE_TABLES = ("rope_parameters", "rope_scaling")
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


def rope_table_problems(table: str, values: object) -> Iterator[Problem]:
    """Yields what is no number in a table of rope settings, or in one of a kind of layers within it."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        yield Problem(table, f"{values!r:.40}", "is not a table of settings", OWN_FOLDER_FIX)
        return
    nested = {f"{table}.{name}": value for name, value in values.items() if isinstance(value, Mapping)}
    for path, numbers in {table: values, **nested}.items():
        for name in _ROPE_NUMBERS:
            if not has_type(numbers.get(name), "number"):
                yield type_problem(f"{path}.{name}", numbers[name], "number")


def has_type(value: object, kind: SettingType) -> bool:
    """Whether a value has a type; null is an unset one of any."""
    if value is None:
        return True
    if kind == "ids" and isinstance(value, list):
        return all(has_type(item, "whole") and item is not None for item in value)
    if kind == "switch" or isinstance(value, bool):
        return kind == "switch" and isinstance(value, bool)
    if isinstance(value, int):
        return -MAX_INT64 <= value <= MAX_INT64
    return kind == "number" and isinstance(value, float) and abs(value) <= sys.float_info.max


def type_problem(key: str, value: object, kind: SettingType) -> Problem:
    """Returns the problem of a value of another type."""
    return Problem(key, f"{value!r:.40}", _RULES[kind], OWN_FOLDER_FIX)
