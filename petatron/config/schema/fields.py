"""Reflection of the schema: every field as data, with its flag, type, default, choices and documentation.

The schema is the only place a setting is declared, so flags, YAML keys, help text and the reference page are all read
from it here. Types come from the annotations; documentation is the string literal under a field, which Python does not
keep at run time, so it is read from the schema's source (by a pattern: parsing it would take longer than all else that
`--help` does). `FieldInfo.parse` is the one way text becomes a
value, for a flag and for a YAML scalar alike; that is why `live: on` stays the word "on" although YAML 1.1 would call
it a boolean, and why `lr: 3e-4` is a number although YAML 1.1 would call it a string.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from petatron.config.schema.numeric_bounds import NumericBounds
from petatron.config.schema.optimizer import BUILT_IN_RULES
from petatron.config.schema.optimizers.update_rule_spec import OPTIMIZER_NAME
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.setting_metadata import Feature, Role, UsedWhen

FieldKind = Literal["int", "float", "bool", "str", "choice"]
ConfigT = TypeVar("ConfigT", bound=RawRunConfig)
NoteT = TypeVar("NoteT")
FieldValue = int | float | bool | str | None | tuple[int, ...] | tuple[str, ...]

NONE_WORDS = ("none", "null")
_DECLARATION = re.compile(r'^class (?P<owner>\w+)|^    (?P<name>\w+): |^    """(?P<doc>.*?)"""', re.M | re.S)
_ROLES: frozenset[Any] = frozenset(typing.get_args(Role))
_TRUE_WORDS, _FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")
_KIND_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word or path"}


@dataclass(frozen=True)
class FieldInfo:
    """One setting. `is_list` marks a tuple of `kind`; `optional` marks a field that may be unset (`none`).

    `choices` are all its values, or, of a word, those known before anything is imported.

    `notes` are what stands next to the type in the schema's `Annotated` (`setting_metadata.py`), and `marks` the words among them: path,
    private, one start, one load, switch, roles. A `switch` is a choice with on and off that may be written as a boolean: `--x`, `--no-x`,
    `x: true`.
    """

    section: str
    name: str
    kind: FieldKind
    is_list: bool
    optional: bool
    choices: tuple[str, ...]
    default: FieldValue
    doc: str
    feature: Feature
    notes: tuple[Any, ...] = ()

    @functools.cached_property
    def marks(self) -> frozenset[Any]:
        return frozenset(note for note in self.notes if isinstance(note, str))

    @functools.cached_property
    def bounds(self) -> NumericBounds | None:
        return next(iter(self.notes_of(NumericBounds)), None)

    @functools.cached_property
    def role(self) -> Role:
        roles: list[Role] = [*(self.marks & _ROLES), self.feature.role]
        return roles[0]

    @functools.cached_property
    def used_when(self) -> tuple[UsedWhen, ...]:
        """The conditions of its feature, unless it selects that, and its own."""
        return (*(() if "selects" in self.marks else self.feature.used_when), *self.notes_of(UsedWhen))

    @property
    def is_variant(self) -> bool:
        """Whether it is a departure from the plain layer, which is its default."""
        return self.feature.variants or "variant" in self.marks

    def notes_of(self, kind: type[NoteT]) -> tuple[NoteT, ...]:
        return tuple(note for note in self.notes if isinstance(note, kind))

    def unused_reason(self, config: RawRunConfig) -> str | None:
        """Returns why it has no effect in a config; None if it has one, and nothing to tell ("") if it only is not compared."""
        return next((item.reason.format(run=config) for item in self.used_when if not item.holds(config)), None)

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def is_switch(self) -> bool:
        return "switch" in self.marks

    @property
    def value_words(self) -> tuple[str, ...]:
        """The words that follow the flag of a boolean or a switch as its value; any other word does not belong to it."""
        return ("true", "false", *self.choices)

    @property
    def off_value(self) -> FieldValue:
        """What `--no-x` sets a boolean or a switch to."""
        return "off" if self.is_switch else False

    @property
    def meaning(self) -> str:
        """The first sentence of its documentation, for errors: the rest says where a default comes from, and details."""
        return f"It is: {self.doc.partition('. ')[0].removesuffix('.')}."

    @property
    def type_name(self) -> str:
        """The type as printed on the reference page."""
        name = " | ".join(self.choices) if self.kind == "choice" else self.kind
        return f"{name} ..." if self.is_list else name

    def parse(self, text: str) -> FieldValue:
        """Parses one value from text; `ValueError` tells what is expected."""
        if self.optional and text.lower() in NONE_WORDS:
            return None
        if self.is_switch and text.lower() in _TRUE_WORDS + _FALSE_WORDS:
            return "on" if text.lower() in _TRUE_WORDS else "off"
        if self.kind == "choice":
            if text not in self.choices:
                single = len(self.choices) == 1
                allowed = f"{self.choices[0]}, the only choice" if single else f"one of {join_with_or(self.choices)}"
                raise ValueError(f"is not {allowed}")
            return text
        try:
            value = _PARSERS[self.kind](text)
        except ValueError:
            raise ValueError(f"is not {_KIND_NAMES[self.kind]}") from None
        # What overflows must not reach derivation; other values wait for the rules, which have more to say about them.
        if self.kind == "int" and self.bounds is not None and value > self.bounds.high:
            raise ValueError(self.bounds.violation(value))
        return value


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE_WORDS + _FALSE_WORDS:
        raise ValueError
    return word in _TRUE_WORDS


_PARSERS: Mapping[str, Any] = {"int": int, "float": _parse_float, "bool": _parse_bool, "str": str}


def flag_name(name: str) -> str:
    """`num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def join_with_or(items: Iterable[object]) -> str:
    """Joins words as in `1, 2 or 4`."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def closest_matches(word: str, candidates: Iterable[str], *, count: int = 2, cutoff: float = 0.72) -> list[str]:
    """Returns the candidates most similar to `word`, ignoring case, best first; clearly worse ones are omitted."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.lower(), lowered, n=count, cutoff=cutoff)
    scores = [difflib.SequenceMatcher(None, match, word.lower()).ratio() for match in close]
    return [lowered[match] for match, score in zip(close, scores) if score >= scores[0] - 0.04]


@functools.cache
def sections() -> dict[str, type]:
    """Maps section names to their dataclasses, in schema order."""
    hints = typing.get_type_hints(RawRunConfig)
    return {item.name: hints[item.name] for item in fields(RawRunConfig) if is_dataclass(hints[item.name])}


@functools.cache
def all_fields() -> tuple[FieldInfo, ...]:
    """Returns every field of every section, in schema order."""
    documentation = _field_docs()
    infos: list[FieldInfo] = []
    for section, section_class in sections().items():
        for item, owner in _fields_with_owners(section_class):
            hint, doc = vars(owner)["__annotations__"][item.name], documentation[owner.__name__, item.name]
            if isinstance(hint, str):
                # Not by `get_type_hints`, where functions among the notes would not see their module.
                hint = eval(hint, vars(sys.modules[owner.__module__]))
            feature = vars(owner).get("feature") or vars(section_class).get("feature", Feature(section, role="runtime"))
            infos.append(_field_info(section, item, hint, doc, feature))
    return tuple(infos)


def _fields_with_owners(section_class: type) -> list[tuple[Field[Any], type]]:
    """Returns the fields of a section with the class that declares each; a section's own come before inherited ones."""
    declared = {
        name: owner for owner in reversed(section_class.__mro__) for name in vars(owner).get("__annotations__", {})
    }
    owned = [(item, declared[item.name]) for item in fields(section_class)]
    return sorted(owned, key=lambda pair: section_class.__mro__.index(pair[1]))


@functools.cache
def fields_by_name() -> dict[str, FieldInfo]:
    """Maps field names to fields. Names are unique over all sections, so that a flag needs no prefix."""
    index = {info.name: info for info in all_fields()}
    assert len(index) == len(all_fields()), "a field name is used in two sections"
    return index


@functools.cache
def fields_by_path() -> dict[str, FieldInfo]:
    return {info.path: info for info in all_fields()}


def flatten_config(config: RawRunConfig) -> dict[str, FieldValue]:
    """Maps paths to the values of all fields."""
    return {path: getattr(getattr(config, info.section), info.name) for path, info in fields_by_path().items()}


def unflatten_config(values: Mapping[str, FieldValue]) -> RawRunConfig:
    """Inverts `flatten_config`; omitted paths get their default."""
    return replace_fields(RawRunConfig(), values)


def replace_fields(config: ConfigT, values: Mapping[str, FieldValue]) -> ConfigT:
    """Returns the config with other values at some paths."""
    grouped: dict[str, dict[str, FieldValue]] = {}
    for path, value in values.items():
        info = fields_by_path()[path]
        if getattr(getattr(config, info.section), info.name) is not value:
            grouped.setdefault(info.section, {})[info.name] = value
    changed: dict[str, Any] = {
        name: replace(getattr(config, name), **section_values) for name, section_values in grouped.items()
    }
    return replace(config, **changed)


def _field_info(section: str, item: Field[Any], hint: Any, doc: str, feature: Feature) -> FieldInfo:
    assert item.default is not MISSING, f"{section}.{item.name} has no default"
    optional = many = False
    choices: tuple[str, ...] = ()
    notes: list[Any] = []
    while (origin := typing.get_origin(hint)) is not None and origin is not Literal:
        if origin is Annotated:
            hint, *outer = typing.get_args(hint)
            notes += outer
        elif origin is tuple:
            hint, many = typing.get_args(hint)[0], True
        else:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
            optional = True
    kind: FieldKind
    if origin is Literal:
        kind, choices = "choice", typing.get_args(hint)
    else:
        kind = hint.__name__
        choices = tuple(BUILT_IN_RULES) if OPTIMIZER_NAME in notes else ()
    return FieldInfo(section, item.name, kind, many, optional, choices, item.default, doc, feature, tuple(notes))


def _field_docs() -> dict[tuple[str, str], str]:
    """Returns the documentation of every field by the class that declares it, on one line however the source breaks it."""
    docs: dict[tuple[str, str], str] = {}
    classes = [owner for section_class in sections().values() for owner in section_class.__mro__ if is_dataclass(owner)]
    for module in dict.fromkeys(owner.__module__ for owner in classes):
        owner = name = ""
        for match in _DECLARATION.finditer(inspect.getsource(sys.modules[module])):
            if match["owner"]:
                owner, name = match["owner"], ""
            elif match["name"]:
                name = match["name"]
            elif name:
                docs[owner, name], name = " ".join(match["doc"].split()), ""
    return docs
