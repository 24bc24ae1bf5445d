"""Flags mean to Petatron what they mean to Megatron: of hundreds of random command lines, both derive the same numbers.

`make_golden.py` ran Megatron's own parser, configs and schedules; here ours run on the same flags. Whatever differs has a row in
`known_differences.py`, and every row is needed.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from petatron.base.errors import Problem
from petatron.config.derived_defaults import resolve_derived
from petatron.validate import resolve_config
from tests.megatron_parser.known_differences import NUMBERS, OUR_REFUSALS, THEIR_REFUSALS, Case
from tests.megatron_parser.our_numbers import OurNumbers
from tests.megatron_parser.random_flags import command_line

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_parser"
DOCS = Path(__file__).parents[2] / "docs" / "coming-from.md"
VERSIONS = ("0.17.1", "0.19.2")
PRECISION = 1e-5  # of the digits in the files


@cache
def golden(version: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{version}.json").read_text())


def numbers_of(document: dict[str, Any], row: list[Any]) -> dict[str, Any]:
    """Returns what Megatron derived for the case of a row."""
    unusual = {document["names"][index]: value for index, value in zip(row[1::2], row[2::2], strict=True)}
    return {name: value for name, value in (document["usual"] | unusual).items() if value is not None}


def ours(flags: list[str], world_size: int) -> tuple[OurNumbers | None, list[Problem]]:
    loaded, problems = resolve_config(["--megatron-defaults", *flags], world_size=world_size)
    return None if problems else OurNumbers(resolve_derived(loaded.config)), problems


@cache
def outcome() -> tuple[list[str], Counter[str], int]:
    """Returns what nothing explains, how often each explanation was needed, and how many numbers were equal."""
    unexplained: list[str] = []
    used: Counter[str] = Counter()
    equal = 0
    for version in VERSIONS:
        document = golden(version)
        for row in document["accepted"]:
            flags, world_size = command_line(row[0], ramps=document["ramps"])
            found, problems = ours(flags, world_size)
            told = f"{version} case {row[0]} (world size {world_size}): {' '.join(flags)}\n   "
            if found is None:
                unexplained += [told + text for text in _unexplained_problems(problems, used)]
                continue
            case = Case(version, flags, numbers_of(document, row), found)
            different = [name for name, value in case.theirs.items() if not is_equal(name, value, found)]
            equal += len(case.theirs) - len(different)
            unexplained += [
                f"{told}{name}: {case.theirs[name]} there, {found[name]} here"
                for name in different
                if not _is_known(case, name, used)
            ]
        for number in document["refused"]:
            flags, world_size = command_line(number, ramps=document["ramps"])
            found, problems = ours(flags, world_size)
            if found is not None:
                reasons = [
                    refusal.reason for refusal in THEIR_REFUSALS if refusal.holds(Case(version, flags, {}, found))
                ]
                used.update(reasons)
                unexplained += [] if reasons else [f"{version} case {number} is refused there only: {' '.join(flags)}"]
    return unexplained, used, equal


def _is_known(case: Case, name: str, used: Counter[str]) -> bool:
    reasons = [known.reason for known in NUMBERS if name in known.names and known.holds(case)]
    used.update(reasons)
    return bool(reasons)


def _unexplained_problems(problems: list[Problem], used: Counter[str]) -> list[str]:
    unexplained = []
    for problem in problems:
        reasons = [known.reason for known in OUR_REFUSALS if known.flag == problem.where and known.text in str(problem)]
        used.update(reasons)
        unexplained += [] if reasons else [f"refused here only: {problem}"]
    return unexplained


def is_equal(name: str, theirs: Any, found: OurNumbers) -> bool:
    if name != "over_time":
        return is_close(theirs, found[name])
    values = {row[0]: row for row in found[name]}
    # A run that is longer there is a difference of its own.
    return all(is_close(row, values[row[0]]) for row in theirs if row[0] in values)


def is_close(theirs: Any, found: Any) -> bool:
    if isinstance(theirs, list):
        same_length = isinstance(found, list) and len(theirs) == len(found)
        return same_length and all(map(is_close, theirs, found))
    if isinstance(theirs, dict):
        return (
            isinstance(found, dict)
            and theirs.keys() == found.keys()
            and all(is_close(theirs[key], found[key]) for key in theirs)
        )
    if isinstance(theirs, float) and isinstance(found, int | float):
        return found == pytest.approx(theirs, rel=PRECISION, abs=0)
    return theirs == found


@pytest.mark.parametrize("version", VERSIONS)
def test_flags_are_those_that_megatron_was_given(version: str):
    document, digest = golden(version), 0
    for case in range(document["cases"]):
        digest = crc32(" ".join(command_line(case, ramps=document["ramps"])[0]).encode(), digest)
    assert digest == document["flags_digest"], (
        "regenerate the golden numbers: python -m tests.megatron_parser.make_golden"
    )


def test_both_derive_the_same_numbers_or_a_known_reason_says_why_not():
    unexplained, _, equal = outcome()
    assert not unexplained, f"{len(unexplained)}:\n" + "\n".join(unexplained[:20])
    assert equal > 20_000


def test_every_known_difference_is_one():
    used = outcome()[1]
    assert [known.reason for known in (*NUMBERS, *OUR_REFUSALS, *THEIR_REFUSALS) if known.reason not in used] == []


def test_a_number_that_differs_is_found():
    document = golden("0.19.2")
    flags, world_size = command_line(document["accepted"][0][0])
    theirs = numbers_of(document, document["accepted"][0])
    found, _ = ours(flags, world_size)
    assert found is not None
    changed = theirs | {"ffn_hidden_size": theirs["ffn_hidden_size"] + 1, "over_time": [[1, 0.5, 0.5]], "stages": [99]}
    differing = {name for name, value in changed.items() if not is_equal(name, value, found)}
    assert differing >= {"ffn_hidden_size", "over_time", "stages"}


def test_guide_lists_every_difference_of_numbers():
    text = " ".join(DOCS.read_text().split())
    assert [known.reason for known in NUMBERS if known.reason not in text] == []
