"""The metadata of a setting beside its type, default and documentation: role, when it is used, conflicts, toy size.

Notes stand in a field's `Annotated`, next to the bounds of its number. What all settings of a section share is in the class variable
`feature` of the class that declares them. Notices of settings without effect, a model's identity, the comparison of two models, `--toy`,
what a typed flag drops from a preset, many checks and the reference page are derived from them, so that no other file lists settings.

Words among the notes: `runtime`, `training`, `limit` and `redundant` are roles (`Role`); `selects` marks a setting that turns its feature
on, and so has an effect without it; `variant` marks one by which a layer departs from the plain one, which is its default; `later` one
that was added to its feature. Models stored before there was a variant or a later setting had its default. `at least 1`, `above 0` and
`below 1` are bounds of a number of a feature in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar, dataclass_transform

RunSettings: TypeAlias = Any
"""The settings of a run by section, a `RawRunConfig`: it is made of classes whose conditions read it, so they cannot import it."""
Role = Literal["identity", "redundant", "limit", "runtime", "training"]
"""`identity`: two models that differ in it are different functions of their weights. `redundant`: stored with the identity, and follows
from the rest of it. `limit`: how far a model may be used. `runtime`: how a run computes or shards. `training`: only training reads it."""

SectionT = TypeVar("SectionT")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings_section(section: type[SectionT]) -> type[SectionT]:
    """Declares the settings of one feature, as a base of the config that has them. Nobody builds one by itself, and without the methods
    of a dataclass, twenty of them do not slow down `--help`.
    """
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(section)


@dataclass(frozen=True, slots=True)
class UsedWhen:
    """A condition without which a setting has no effect, and why; the reason may name settings, as in `{run.optim.optimizer}`.

    Without a reason it counts where models are compared only: nobody is told, as the setting decides something else besides.
    """

    holds: Callable[[RunSettings], object]
    reason: str = ""


def used_with(*settings: str, value: Any = None, reason: str = "") -> UsedWhen:
    """Returns the condition that one of these settings, by path, is set or turned on, or has a value.

    >>> used_with("precision.fp8_recipe", value="delayed").reason, used_with("log.profile").reason
    ('it is for --fp8-recipe delayed', 'it is for --profile')
    """
    flags = " and ".join(f"--{path.partition('.')[2].replace('_', '-')}" for path in settings)
    getters = [attrgetter(path) for path in settings]

    def is_used(run: RunSettings) -> bool:
        values = [getter(run) for getter in getters]
        if value is not None:
            return value in values
        return any(item is not None and item is not False and item != () for item in values)

    return UsedWhen(is_used, reason or f"it is for {flags}{'' if value is None else f' {value}'}")


@dataclass(frozen=True, slots=True)
class Feature:
    """What the settings of one class are about.

    `used_when` holds for all of them but those that select the feature. `variants`: all defaults are the plain layer. `always_stored`:
    a model's identity has these settings also where it does not use them, since it had them before other features came.
    `may_be_added`: a run that starts from a model without the feature may have it, and draws its weights.
    `recompute_modules` are those of `--recompute-modules` that only models with the feature have; `offload_modules` those of
    `--offload-modules`.
    """

    name: str
    used_when: tuple[UsedWhen, ...] = ()
    role: Role = "identity"
    variants: bool = False
    always_stored: bool = False
    may_be_added: bool = False
    recompute_modules: tuple[str, ...] = ()
    offload_modules: tuple[str, ...] = ()

    def unused_reason(self, run: RunSettings) -> str | None:
        """Returns why the feature is not in use, or None if it is."""
        return next((item.reason.format(run=run) for item in self.used_when if not item.holds(run)), None)


@dataclass(frozen=True, slots=True)
class NotWith:
    """Another setting beside which this one means nothing: typed, the other drops a preset's value of this one.

    With a rule, both together are a problem otherwise; `{value}` in the rule is that of the other setting, and `shown` the form in which
    the problem has this one's.
    """

    setting: str
    when: Callable[[Any], object] = bool
    rule: str = ""
    fix: str = "Leave one out."
    shown: str = "{}"


@dataclass(frozen=True, slots=True)
class ToySize:
    """The most that `--toy` leaves of a size."""

    limit: int


@dataclass(frozen=True, slots=True)
class ComparedAs:
    """The form in which values are compared: a function of the value and of all settings of its model, by name."""

    normal_form: Callable[[Any, Mapping[str, Any]], Any]
