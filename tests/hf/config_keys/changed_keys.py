"""Other legal values for every key that a family's config class in transformers has, alone or in a rope table.

The keys are those of the class with what it inherits, its other spellings, and what the code of the model reads of a config.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

Config = dict[str, Any]
_ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "gelu_new", "relu2", "swish")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "moe_router_activation_func": ("softmax", "sigmoid"),
    "problem_type": ("regression",),
    "_attn_implementation": ("sdpa", "eager"),
    "return_dict": (),  # how outputs are passed
}
_KEYS_OF_FILES = (
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "head_dim",
    "sliding_window",
)
"""Keys that files have besides those of the class."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A key, perhaps within tables, and another value."""

    path: tuple[str, ...]
    value: Any

    def apply(self, config: Config) -> None:
        for name in self.path[:-1]:
            config = config[name]
        config[self.path[-1]] = copy.deepcopy(self.value)

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} = {self.value!r}"


def changed(config: Config, *changes: Change) -> Config:
    config = copy.deepcopy(config)
    for change in changes:
        change.apply(config)
    return config


def all_changes(model: PreTrainedModel, config: Config) -> Iterator[Change]:
    """Yields the other values of all keys, and every kind of rotary scaling with its own keys."""
    modules = {type(part).__module__ for part in model.modules() if isinstance(part, PreTrainedModel)}
    read = {name for module in modules for name in _keys_in_source(module)}
    yield from _of_one_config(model, model.config, config, read)
    for name in model.config.sub_configs.keys() & config.keys():
        inside = _of_one_config(model, getattr(model.config, name), config[name], read)
        yield from (Change((name, *change.path), change.value) for change in inside)


def _of_one_config(model: PreTrainedModel, made: PreTrainedConfig, config: Config, read: set[str]) -> Iterator[Change]:
    """Yields those of a config alone, without the configs of parts of the model."""
    names = {*config, *type(made).attribute_map, *read, *_KEYS_OF_FILES}
    for key in sorted(name for name in names if not callable(getattr(made, name, None))):
        value = config.get(key, getattr(made, key, None))
        yield from (Change((key,), other) for other in _others(key, value))
    yield from _in_tables((), {name: value for name, value in config.items() if name not in made.sub_configs})
    if "rope_parameters" in config:
        yield from _rope_tables(model, config)


def _keys_in_source(module: str) -> Iterator[str]:
    source = inspect.getsource(sys.modules[module])
    pairs = re.findall(r'\bconfig\.([a-z_]\w*)|getattr\((?:self\.)?config, "(\w+)"', source)
    return (name for pair in pairs for name in pair if name)


def _in_tables(path: tuple[str, ...], table: Config) -> Iterator[Change]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _in_tables((*path, name), value)
        elif path:
            yield from (Change((*path, name), other) for other in _others(name, value))


def _others(key: str, value: Any) -> list[Any]:
    """Values of the type of this one, the most telling first; where nothing is set, one that a number or a switch may have."""
    if key in _CHOICES:
        return [choice for choice in _CHOICES[key] if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 3, *([value - 1] if value > 0 else [])]
    if isinstance(value, float):
        return [0.5 * value + 0.125, 2 * value + 0.25]
    if isinstance(value, str):
        return [name for name in _ACTIVATIONS if name != value] if value in _ACTIVATIONS else [f"other_{value}"]
    if isinstance(value, list) and value:
        return [value[::-1], [*value[:-1], value[0]]]
    return [1, 0.5, [0]] if value is None else []


def _rope_tables(model: PreTrainedModel, config: Config) -> Iterator[Change]:
    """Whole tables: of one key alone that a kind does not need, and of every kind with its optional keys."""
    pairs = next((len(value) for name, value in model.named_buffers() if name.endswith("inv_freq")), 1)
    old = config["rope_parameters"]
    if any(isinstance(value, dict) for value in old.values()):
        for name, table in old.items():
            yield from (Change(("rope_parameters", name), {**_plain(table), **new}) for new in _scalings(pairs))
        return
    yield from (Change(("rope_parameters",), {**_plain(old), **new}) for new in _scalings(pairs))
    yield from (Change(("rope_scaling",), new) for new in _scalings(pairs))


_PLAIN_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section")


def _plain(table: Config) -> Config:
    return {name: value for name, value in table.items() if name in _PLAIN_KEYS}


def _scalings(pairs: int) -> Iterator[Config]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    yield yarn
    for more in (
        {"attention_factor": 0.8},
        {"attention_factor": 1.3},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0.4},
        {"beta_fast": 1, "beta_slow": 1},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"truncate": False},
        {"factor": None},
        {"factor": 1.0, "attention_factor": 0.8},
    ):
        yield {**yarn, **more}
    llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yield {**llama3, "original_max_position_embeddings": 16}
    yield {"rope_type": "linear", "factor": 2.5}
    yield {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}
    yield {"rope_type": "proportional", "factor": 4.0}
    lists = {"short_factor": [1.0 + 0.1 * pair for pair in range(pairs)], "long_factor": [2.0] * pairs}
    for context in (16, 32):
        longrope = {"rope_type": "longrope", **lists, "original_max_position_embeddings": context}
        yield longrope
        yield {**longrope, "attention_factor": 0.8}
        yield {**longrope, "factor": 8.0}
    yield {"rope_type": "default", "factor": 4.0, "attention_factor": 0.8, "beta_fast": 8.0, "truncate": False}
