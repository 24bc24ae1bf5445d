"""`Rule`, a filter rule: a number measured of a document, and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from petatron.base.errors import Problem
from petatron.config.schema.fields import closest_matches
from petatron.data.curate.filter.text_view import TextView


@dataclass(frozen=True, slots=True)
class Rule:
    """Drops a document whose measure is below `least`, or above `most`; a rule has one of them.

    >>> rule = Rule("few_words", lambda view: len(view.tokens), least=2)
    >>> rule.drops(TextView("one")), rule.drops(TextView("one two"))
    (True, False)
    """

    name: str
    measure: Callable[[TextView], float]
    least: float | None = None
    most: float | None = None

    def drops(self, view: TextView) -> bool:
        value = self.measure(view)
        return (self.least is not None and value < self.least) or (self.most is not None and value > self.most)

    @property
    def bound(self) -> str:
        """The bound in words."""
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def with_bound(self, number: float) -> Rule:
        return replace(self, least=number) if self.least is not None else replace(self, most=number)


@dataclass(frozen=True, slots=True)
class LineRule:
    """Removes the lines of a document that it does not keep."""

    name: str
    keeps: Callable[[str], bool]


def adjust_rules(
    rules: Sequence[Rule], bounds: Mapping[str, float], without: Sequence[str], line_rules: Sequence[LineRule] = ()
) -> tuple[tuple[Rule, ...], tuple[LineRule, ...], list[Problem]]:
    """Returns the rules with other bounds and without some of them, and what is wrong with the names."""
    bounded = {rule.name for rule in rules}
    known = {*bounded, *(rule.name for rule in line_rules)}
    problems = [_unknown("--limit", name, bounded) for name in bounds if name not in bounded]
    problems += [_unknown("--without", name, known) for name in without if name not in known]
    adjusted = tuple(
        rule.with_bound(bounds[rule.name]) if rule.name in bounds else rule
        for rule in rules
        if rule.name not in without
    )
    return adjusted, tuple(rule for rule in line_rules if rule.name not in without), problems


def _unknown(flag: str, name: str, known: set[str]) -> Problem:
    close = closest_matches(name, sorted(known), count=1, cutoff=0.6)
    hint = f"Did you mean {close[0]}?" if close else f"Rules in use: {', '.join(sorted(known)) or 'none'}."
    return Problem(flag, name, "is no rule of this filter", hint)
