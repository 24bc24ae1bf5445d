"""Translates between a config.json and the settings of a model, by one function of each family that serves both directions.

    def _mistral(config: Translation) -> None:
        llama(config, num_key_value_heads=8, max_position_embeddings=131072)
        windows(config, 4096)
        rope(config)
        config.always(add_bias_linear=False, add_qkv_bias=False)

A function calls these, or helpers that call them, in order:

    copy(setting, key, default)         a setting is the value of a key; without transformers' default the key is required
    copy_same(setting=default)          the same of settings whose keys have their names
    convert(settings, read, write)      settings that are no copies: `read` takes the keys and returns the settings with what is wrong,
                                        `write` takes a model and returns the keys; further arguments are keys, with their defaults
    always(setting=value)               every model of the family has this value; a copy or a conversion, and a later call, count more
    only(key=value)                     the decoder can express this value of the key, transformers' default, and no other
    also(key=spelling)                  another spelling of a key that later calls read; it is not written
    expect(setting, allowed, holds)     the family has no key for a model of which `holds` is false
    within(key, translate)              another function runs over a table inside (the text model of one that reads images)
    layer_pattern(patterns, read, write)    the layers are those of `--hybrid-layer-pattern`, which have one branch each

`ConfigReader` runs the function over a config.json: it checks that keys are there, with their types, and collects all problems.
`ConfigWriter` runs it over a model: settings that the function does not name, or that have another value than it says, are why a family
cannot express the model. So what is read, what is written and what can be exported have one place, and the keys that a family has are
those that its function asks for.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.model import MoEConfig
from petatron.config.schema.model_identity import model_settings, variant_defaults
from petatron.models.hf.check_claimed_counts import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS
from petatron.models.hf.config_json_types import (
    COMMON,
    OWN_FOLDER_FIX,
    ROPE_TABLES,
    STAND_INS,
    TYPES,
    SettingType,
    has_type,
    rope_table_problems,
    type_problem,
)
from petatron.models.model_spec import ModelSpec

Keys = Mapping[str, Any]
Settings = dict[str, Any]
Read = Callable[[Keys], tuple[Settings, list[Problem]]]
Write = Callable[[ModelSpec], Keys]
ReadPattern = Callable[[Keys], str | Problem]
WritePattern = Callable[[str], Keys]
Holds = Callable[[ModelSpec], object]
Names = Iterable[str] | Mapping[str, str]
"""Settings; with the key of each, where there is one."""
REQUIRED: Any = object()
OTHER_MODEL_FIX = "Use another model; the decoder has no such part."
_COUNTS = (
    "num_layers", "encoder_num_layers", "vision_num_layers", "vision_hidden_size", "vision_num_attention_heads", "vision_patch_size",
    "hidden_size", "num_attention_heads", "vocab_size", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim",
)  # fmt: skip
_MAX_COUNTS = {
    "num_layers": MAX_LAYERS,
    "encoder_num_layers": MAX_LAYERS,
    "vision_num_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "linear_num_key_heads": MAX_HEADS,
}
# Numbers in which null means nothing; in others it turns something off, or is what sizes give.
_NEVER_NULL = ("query_pre_attn_scalar", "max_window_layers", "no_rope_layer_interval", "attn_scale", "floor_scale")
_NEVER_NULL_SETTINGS = ("max_position_embeddings", "norm_epsilon")
# Parts of a model that a family does not have unless its function names them.
_OPTIONAL_PARTS: Mapping[str, Any] = {
    "window_size": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "mtp_use_repeated_layer": False,
    "moe_router_linear_bias": False,
    "moe_apply_probs_on_input": False,
}


@dataclass(frozen=True, slots=True)
class Table:
    """How a table inside of config.json is read and written.

    read: returns the table from the content of config.json, with the defaults that transformers has for it. write: returns the table from
    its keys and the model. spec: makes the model that the table describes of the one that config.json does.
    """

    read: Callable[[Keys], Keys]
    write: Callable[[Keys, ModelSpec], Keys]
    spec: Callable[[ModelSpec], ModelSpec] = lambda spec: spec


class Translation(ABC):
    """What the function of a family runs over.

    names: the settings that were copied or converted so far, with the key of each that has one. fixed: those that are always the same.
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self.names: dict[str, str] = {}
        self.fixed: Settings = {}
        self.problems: list[Problem] = []

    def always(self, **settings: Any) -> None:
        self.fixed |= settings

    @abstractmethod
    def setting(self, name: str) -> Any:
        """Returns the value of a setting: the one read so far, or the model's."""

    @abstractmethod
    def copy(self, setting: str, key: str, default: Any = REQUIRED, *, needed: bool = False) -> None:
        """needed: it may not be unset."""

    def copy_same(self, **defaults: Any) -> None:
        """Copies settings whose keys have their names; `defaults` are transformers'."""
        for name, default in defaults.items():
            self.copy(name, name, default)

    @abstractmethod
    def convert(self, settings: Names, read: Read | None = None, write: Write | None = None, **keys: Any) -> None: ...

    @abstractmethod
    def only(self, **keys: Any) -> None: ...

    @abstractmethod
    def also(self, **spellings: str) -> None: ...

    @abstractmethod
    def expect(self, setting: str, allowed: str, holds: Holds) -> None: ...

    @abstractmethod
    def within(self, key: str, translate: Callable[[Translation], None], table: Table) -> None: ...

    @abstractmethod
    def layer_pattern(self, patterns: str, read: ReadPattern, write: WritePattern, *, stand_in: str) -> str:
        """Returns the pattern. patterns: a regular expression of those that the family has. stand_in: one of them, by which other keys
        are checked where the pattern cannot be read."""

    def _name(self, settings: Names) -> None:
        self.names |= settings if isinstance(settings, Mapping) else dict.fromkeys(settings, "")


class ConfigReader(Translation):
    """Reads settings.

    wrong: by key, those that are missing, of another type, or spelled in two ways with two values; a value of the type stands in for
    each, the first or the second of two.
    """

    def __init__(self, family: str, config: Keys, *, stand_in: int = 0) -> None:
        super().__init__(family)
        self.wrong: dict[str, Problem] = {}
        self._spellings: set[str] = set()
        self._given: Settings = {}  # the keys asked for so far
        self._values: Settings = {}
        self._config = dict(config)
        self._stand_in = stand_in

    def values(self) -> Settings:
        """Returns the settings, once all is read."""
        self._view()
        return {**self.fixed, **self._values}

    def keys(self) -> set[str]:
        """Returns the keys that the family has."""
        return self._spellings | self._given.keys()

    def setting(self, name: str) -> Any:
        return self._values.get(name, self.fixed.get(name))

    def copy(self, setting: str, key: str, default: Any = REQUIRED, *, needed: bool = False) -> None:
        info, value = fields_by_name()[setting], self._config.get(key, default)
        if value is REQUIRED:
            rule = f"is missing, and a {self.family} config.json needs it"
            self.wrong[key] = Problem(key, "", rule, OWN_FOLDER_FIX)
        elif (setting in _COUNTS or (info.section == "moe" and default is not None)) and not is_count(value, 1):
            self.wrong[key] = Problem(key, f"{value!r:.40}", "is not a positive whole number", "Correct config.json.")
        elif setting in _MAX_COUNTS and value > _MAX_COUNTS[setting]:
            rule = f"is more than any model has ({_MAX_COUNTS[setting]:,})"
            self.wrong[key] = Problem(key, str(value), rule, "Correct config.json.")
        needed = needed or setting in _NEVER_NULL_SETTINGS
        self._values[setting] = self._value(key, default, TYPES[info.kind], needed=needed)
        self.names[setting] = key

    def convert(self, settings: Names, read: Read | None = None, write: Write | None = None, **keys: Any) -> None:
        self._name(settings)
        for key, default in keys.items():
            self._value(key, default)
        if read is not None:
            values, problems = read(self._view())
            self._values |= values
            self.problems += problems

    def only(self, **keys: Any) -> None:
        for key, value in keys.items():
            given = self._value(key, value)
            if _null_if_off(given) != _null_if_off(value):
                rule = f"is not {value}, the only value the decoder can express"
                self.problems.append(Problem(key, str(given), rule, OTHER_MODEL_FIX))

    def also(self, **spellings: str) -> None:
        for key, other in spellings.items():
            self._spellings.add(other)
            first, second = self._config.get(key), self._config.get(other)
            if None not in (first, second) and first != second:
                rule = f"is another spelling of {key}, which is {first!r:.40}"
                self.wrong[other] = Problem(other, f"{second!r:.40}", rule, OWN_FOLDER_FIX)
            if other in self._config:
                self._config.setdefault(key, second)

    def expect(self, setting: str, allowed: str, holds: Holds) -> None:
        """Is about models that are written."""

    def within(self, key: str, translate: Callable[[Translation], None], table: Table) -> None:
        content = self._config.get(key)
        if content is not None and not isinstance(content, Mapping):
            rule = "is not a table of settings"
            self.wrong[key] = Problem(key, f"{content!r:.40}", rule, OWN_FOLDER_FIX)
        self._given[key] = content
        reader = ConfigReader(self.family, table.read(self._config), stand_in=self._stand_in)
        translate(reader)
        self._values |= reader.values()
        self.names |= {setting: f"{key}.{name}" if name else "" for setting, name in reader.names.items()}
        inside = {name: replace(problem, where=f"{key}.{problem.where}") for name, problem in reader.wrong.items()}
        self.wrong |= {f"{key}.{name}": problem for name, problem in inside.items()}
        self.problems += [replace(problem, where=f"{key}.{problem.where}") for problem in reader.problems]

    def layer_pattern(self, patterns: str, read: ReadPattern, write: WritePattern, *, stand_in: str) -> str:
        pattern = read(self._config)
        if isinstance(pattern, Problem):
            self.wrong[pattern.where] = pattern
            pattern = stand_in
        self._values |= {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "is_hybrid_model": True}
        return pattern

    def _value(self, key: str, default: Any, kind: SettingType | None = None, *, needed: bool = False) -> Any:
        """Returns the value of a key, or one of its type that stands in for it."""
        kind = kind or TYPES.get(type(default).__name__) or COMMON.get(key)
        self._given[key] = value = self._config.get(key, default)
        if kind is None:
            return value
        is_null = key in self._config and value is None and (needed or key in _NEVER_NULL)
        self._check_type(key, value, kind, is_null=is_null)
        if key in self.wrong:
            self._given[key] = STAND_INS[kind][self._stand_in]
        return self._given[key]

    def _check_type(self, key: str, value: Any, kind: SettingType, *, is_null: bool = False) -> bool:
        if is_null or not has_type(value, kind):
            self.wrong.setdefault(key, type_problem(key, value, kind))
        return key not in self.wrong

    def _view(self) -> Settings:
        """Returns config.json with the defaults of keys asked for, and with what stands in for wrong ones; wrong tables are left out."""
        wrong = [key for key in COMMON if not self._check_type(key, self._config.get(key), COMMON[key])]
        view = self._config | {key: STAND_INS[COMMON[key]][self._stand_in] for key in wrong} | self._given
        for table in ROPE_TABLES:
            problems = {problem.where: problem for problem in rope_table_problems(table, view.get(table))}
            self.wrong |= problems
            view |= {table: None} if problems else {}
        return view


class ConfigWriter(Translation):
    """Collects what a family has no key for, and then the keys."""

    def __init__(self, family: str, spec: ModelSpec, *, model_type: str = "decoder") -> None:
        super().__init__(family)
        self.spec, self._model_type = spec, model_type
        self._moe = spec.moe or MoEConfig()
        self._writes: list[Callable[[], Keys]] = []

    def keys(self) -> Settings:
        """Returns the keys, of a model that the family can express."""
        content: Settings = {}
        for write in self._writes:
            content |= write()
        return content

    def setting(self, name: str) -> Any:
        return getattr(self._moe if model_settings()[name].section == "moe" else self.spec.config, name)

    def copy(self, setting: str, key: str, default: Any = REQUIRED, *, needed: bool = False) -> None:
        value, is_moe = self.setting(setting), model_settings()[setting].section == "moe"
        same = [name for name in self.names if self.names[name] == key and model_settings()[name].section == "moe"]
        if value is None and (needed or (is_moe and default is not None)):
            self._unsupported(setting, "always one")
        elif is_moe and same and value != self.setting(same[0]):
            self._unsupported(setting, f"the value of {same[0]} there")
        self.names[setting] = key
        self._writes.append(lambda: {key: value})

    def convert(self, settings: Names, read: Read | None = None, write: Write | None = None, **keys: Any) -> None:
        self._name(settings)
        if write is not None:
            self._writes.append(lambda: write(self.spec))

    def only(self, **keys: Any) -> None:
        self._writes.append(lambda: keys)

    def also(self, **spellings: str) -> None:
        """Is about files that are read."""

    def expect(self, setting: str, allowed: str, holds: Holds) -> None:
        if not holds(self.spec):
            self._unsupported(setting, allowed)

    def within(self, key: str, translate: Callable[[Translation], None], table: Table) -> None:
        writer = ConfigWriter(self.family, table.spec(self.spec))
        translate(writer)
        self.problems += writer.problems
        self.names |= dict.fromkeys(writer.names, "")
        self.fixed |= writer.fixed
        self._writes.append(lambda: {key: table.write(writer.keys(), self.spec)})

    def layer_pattern(self, patterns: str, read: ReadPattern, write: WritePattern, *, stand_in: str) -> str:
        pattern = self.spec.config.hybrid_layer_pattern or ""
        self._name(("hybrid_layer_pattern",))
        if not re.fullmatch(patterns, pattern):
            self._unsupported("hybrid_layer_pattern", "layers in another order")
        self._writes.append(lambda: write(pattern))
        return pattern

    def finish(self) -> None:
        """Adds the settings that the function does not name, or gives another value."""
        fixed = {name: value for name, value in self.fixed.items() if name not in self.names}
        for name, value in fixed.items():
            if self.setting(name) != value and model_settings()[name].role != "training":
                self._unsupported(name, f"only {value}")
        for name, default in {**_OPTIONAL_PARTS, **variant_defaults()}.items():
            if self.setting(name) != default and name not in fixed and name not in self.names:
                self._unsupported(name, "no such part")
        some_biases = self.setting("add_qkv_bias") and not self.setting("add_bias_linear")
        if some_biases and "add_qkv_bias" not in fixed and "add_qkv_bias" not in self.names:
            self._unsupported("add_qkv_bias", "biases everywhere or nowhere")
        if self.spec.moe is not None and "num_experts" not in self.names:
            self._unsupported("num_experts", "no experts")
        if self.spec.config.model_type != self._model_type:
            self._unsupported("model_type", f"only {self._model_type}")

    def _unsupported(self, setting: str, allowed: str) -> None:
        rule = f"cannot be written as a Hugging Face {self.family} model, which has {allowed}"
        fix = "Such a model is saved in Petatron's own names."
        value = None if setting == "num_experts" and self.spec.moe is None else self.setting(setting)
        self.problems.append(Problem(flag_name(setting), str(value), rule, fix))


def _null_if_off(value: object) -> object:
    """Returns null for a switch that is off: files have either."""
    return None if value is False else value
