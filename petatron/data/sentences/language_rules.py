"""The sentence splitter's rules for each language, from languages.txt."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError

DEFAULT_LANGUAGE = "english"
_FILE = Path(__file__).with_name("languages.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRules:
    """Words in lowercase; abbreviations without their last period.

    never, sometimes, ends: abbreviations that end no sentence, or before one of `starters` (the frequent first words), or before any
    capital letter. number: abbreviations before a number only. has_ordinals: whether "3." may be an ordinal. questions: characters
    beside ? that end a question.
    """

    never: frozenset[str]
    sometimes: frozenset[str]
    ends: frozenset[str]
    number: frozenset[str]
    starters: frozenset[str]
    has_ordinals: bool
    questions: str


def language_rules(name: str) -> LanguageRules:
    """Returns the rules of a language by its English name or its ISO code; `DataError` if there are none.

    >>> language_rules("de") is language_rules("German")
    True
    """
    languages = _languages()
    if name.lower() not in languages:
        known = {id(rules): language for language, rules in reversed(list(languages.items()))}  # the first name of each
        raise DataError(f"--lang {name} has no rules for sentences. Use one of {', '.join(sorted(known.values()))}.")
    return languages[name.lower()]


@functools.cache
def _languages() -> Mapping[str, LanguageRules]:
    """Returns the rules by every name of their language."""
    languages: dict[str, LanguageRules] = {}
    for section in _FILE.read_text(encoding="utf-8").split("\n> ")[1:]:
        names, _, body = section.partition("\n")
        listed: dict[str, list[str]] = {}
        for line in filter(None, body.splitlines()):
            kind, _, text = line.partition(": ")
            listed.setdefault(kind, []).extend(text.split())
        rules = LanguageRules(
            never=frozenset(listed.get("never", ())),
            sometimes=frozenset(listed.get("sometimes", ())),
            ends=frozenset(listed.get("ends", ())),
            number=frozenset(listed.get("number", ())),
            starters=frozenset(listed.get("starters", ())),
            has_ordinals="ordinals" in listed,
            questions="".join(listed.get("questions", ())),
        )
        languages |= dict.fromkeys(names.split(), rules)
    return languages
