"""Checks the bounds and conflicts that settings declare (`config/schema/setting_metadata.py`), and formats problems about numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from petatron.base.errors import Problem
from petatron.config.schema.fields import FieldInfo, all_fields, fields_by_name, flag_name, join_with_or
from petatron.config.schema.model_identity import MODEL_SECTIONS
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.setting_metadata import NotWith

_MOST_DIVISORS = 12


def divisors(number: int) -> str:
    """Lists divisors as in `1, 2, 4 or 8`; a long list is truncated."""
    candidates = [size for size in range(1, min(number, 4096) + 1) if number % size == 0]
    if len(candidates) > _MOST_DIVISORS:
        return ", ".join(str(value) for value in candidates[:_MOST_DIVISORS]) + " or another divisor"
    return join_with_or(candidates)


def multiples_near(number: int, step: int) -> str:
    """Returns the multiples of `step` on both sides of `number`: `96 or 112`."""
    below = number // step * step
    return f"{below} or {below + step}" if below > 0 else str(step)


def or_default(name: str, value: int | str) -> str:
    """Returns `12`, or `10 (default)` for a value that nobody may have typed."""
    return f"{value} (default)" if value == fields_by_name()[name].default else str(value)


def at_least(name: str, value: float | None, minimum: float) -> Iterator[Problem]:
    """Yields a problem when a set value is below its minimum."""
    if value is not None and value < minimum:
        yield Problem(flag_name(name), str(value), f"is below {minimum:g}", f"Use {minimum:g} or more.")


def above(name: str, value: float | None, bound: float) -> Iterator[Problem]:
    """Yields a problem when a set value is not strictly above a bound."""
    if value is not None and value <= bound:
        yield Problem(flag_name(name), str(value), f"is not above {bound:g}", f"Use a number above {bound:g}.")


def within(name: str, value: float | None, low: float, high: float, *, closed: bool = False) -> Iterator[Problem]:
    """Yields a problem when a set value is outside [low, high), or [low, high] if closed."""
    if value is not None and not (low <= value < high or (closed and value == high)):
        span = f"{low:g} to {high:g}" + ("" if closed else f", {high:g} excluded")
        yield Problem(flag_name(name), str(value), "is out of range", f"Use a number from {span}.")


_NUMBER_RULES: Mapping[str, Callable[[str, float, float], Iterator[Problem]]] = {
    "at least": at_least,
    "above": above,
    "below": lambda name, number, bound: within(name, number, 0, bound),
}


def number_problems(config: RawRunConfig, *sections: type) -> Iterator[Problem]:
    """Yields numbers that break a bound of the schema, of the features in use: of all of them, or of some section classes."""
    features = [vars(section)["feature"] for section in sections]
    for info in all_fields():
        number = getattr(getattr(config, info.section), info.name)
        if not isinstance(number, int | float) or (features and info.feature not in features) or _is_idle(info, config):
            continue
        for mark in info.marks:
            relation, _, bound = mark.rpartition(" ")
            if relation in _NUMBER_RULES:
                yield from _NUMBER_RULES[relation](info.name, number, float(bound))


def conflict_problems(config: RawRunConfig) -> Iterator[Problem]:
    """Yields settings of features in use that the schema declares not to be combined with another."""
    for info in all_fields():
        value = getattr(getattr(config, info.section), info.name)
        for note in () if value == info.default or _is_idle(info, config) else info.notes_of(NotWith):
            other = fields_by_name()[note.setting]
            setting = getattr(getattr(config, other.section), other.name)
            if note.rule and note.when(setting):
                yield Problem(info.flag, note.shown.format(value), note.rule.format(value=setting), note.fix)


def _is_idle(info: FieldInfo, config: RawRunConfig) -> bool:
    """Whether a setting belongs to a feature that the model does not have, of which a notice tells."""
    of_model = info.section in MODEL_SECTIONS and "selects" not in info.marks
    return of_model and bool(info.feature.unused_reason(config))


def out_of_bounds(config: RawRunConfig, *, reported: set[str]) -> Iterator[Problem]:
    """Yields numbers outside the bounds of the schema that no rule has reported."""
    for info in all_fields():
        if info.bounds is None:
            continue
        value = getattr(getattr(config, info.section), info.name)
        numbers = value if info.is_list else () if value is None else (value,)
        for number in numbers:
            if (rule := info.bounds.violation(number)) is not None and info.flag not in reported:
                yield Problem(info.flag, str(number), rule, info.meaning)
