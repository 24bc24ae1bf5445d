"""docs/coming-from.md promises nothing that does not exist: flags, values, subcommands and names of its `Here` columns."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import petatron
from petatron.cli.main import SUBCOMMANDS, main
from petatron.config.flags.flag_names_of_other_trainers import suggested_flags
from petatron.config.flags.megatron_flags import ALIASES
from petatron.config.flags.parse_command_line import known_flags, parse_flags
from petatron.optim.mixed_precision import MasterOptimizer

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
# What a placeholder of the page stands for.
PLACEHOLDERS = {"N": "4", "X": "0.5", "DIR": "d", "FILE": "f", "NAME": "n", "PREFIX": "p", "HOST": "h"}
# Values of settings, and an object of theirs that no command line has.
NO_SETTINGS = {"never", "full", "selective", "adamw_torch", "parallelism_config"}
SPAN = re.compile(r"`([^`]+)`")


def rows(text: str) -> list[tuple[str, str, str]]:
    """Section, their cell and ours of every table row."""
    found, section = [], ""
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells[1] != "Here":
            found.append((section, cells[0], cells[1]))
    return found


def our_spans(text: str) -> list[str]:
    prose = [span for line in text.splitlines() if not line.startswith("|") for span in SPAN.findall(line)]
    return sorted({*prose, *(span for _, _, here in rows(text) for span in SPAN.findall(here))})


@cache
def _help_of(*words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


def problem_with(span: str) -> str | None:
    """Why a code span of ours is wrong; None if it is right, or names nothing that could be."""
    words = shlex.split(span)
    if words[0] == "petatron":
        return _command_problem(words[1:])
    if words[0].startswith("--"):
        return _flags_problem(words)
    owner, _, name = span.partition(".")
    owners = {"petatron": petatron, "model": petatron.Model, "optimizer": MasterOptimizer}
    if owner in owners and name.isidentifier() and not hasattr(owners[owner], name):
        return f"{owner} has no {name}"
    return None


def _flags_problem(words: list[str]) -> str | None:
    if missing := [word for word in words if word.startswith("--") and word not in known_flags()]:
        return f"no flag {missing}"
    if len(words) == 1:
        return None
    problems = parse_flags([PLACEHOLDERS.get(word, word) for word in words]).problems
    return str(problems[0]) if problems else None


def _command_problem(words: list[str]) -> str | None:
    subcommand, rest = words[0], words[1:]
    if subcommand not in SUBCOMMANDS:
        return f"no subcommand {subcommand}"
    if subcommand in ("train", "verify"):
        return _flags_problem([word for word in rest if word not in ("PRESET", "NAME")] or ["--preset"])
    under = [word for word in rest if not word.startswith("--")][:1]
    if under and not re.search(rf"^\s+(petatron {subcommand} )?{under[0]}\b", _help_of(subcommand), re.MULTILINE):
        return f"no {subcommand} {under[0]}"
    printed = _help_of(subcommand, *under)
    missing = [word for word in rest if word.startswith("--") and word not in printed]
    return f"no flag {missing} of {subcommand}" if missing else None


def test_what_the_page_names_exists() -> None:
    spans = our_spans(PAGE.read_text())
    assert len(spans) > 100
    assert {span: problem for span in spans if (problem := problem_with(span)) is not None} == {}


WRONG = ["--no-such-flag N", "--pipeline-schedule no-such", "petatron traine", "petatron data feth"]
WRONG += [
    "petatron data fetch --no-such",
    "petatron config shw",
    "petatron.no_such",
    "model.no_such",
    "optimizer.no_such",
]


@pytest.mark.parametrize("span", WRONG)
def test_a_wrong_name_is_noticed(span: str) -> None:
    assert problem_with(span) is not None


def test_megatron_flags_are_accepted_or_refused_as_said() -> None:
    said: dict[str, bool] = {}
    for section, theirs, here in rows(PAGE.read_text()):
        if section == "Megatron-LM" and here.startswith(("the same", "not here")):
            said |= {flag: here.startswith("the same") for flag in SPAN.findall(theirs) if flag.startswith("--")}
    assert len(said) > 40
    assert said == {flag: flag in known_flags() for flag in said}


def field_of(flag: str) -> str:
    return ALIASES.get(flag, flag.removeprefix("--").removeprefix("no-").replace("-", "_"))


def test_a_setting_of_another_system_typed_as_a_flag_is_answered_as_the_page_says() -> None:
    typed: dict[str, bool] = {}
    for section, theirs, here in rows(PAGE.read_text()):
        if section in ("torchtitan", "Hugging Face Trainer and Accelerate") and here.startswith("`--"):
            ours = {field_of(flag) for span in SPAN.findall(here) for flag in suggested_flags(span)}
            for name in SPAN.findall(theirs):
                if re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z_]+)?", name) and name not in NO_SETTINGS:
                    parsed = parse_flags([f"--{name}", "1"])
                    said = {field_of(flag) for problem in parsed.problems for flag in suggested_flags(problem.fix)}
                    said |= {setting.path.partition(".")[2] for setting in parsed.settings}
                    typed[name] = not said.isdisjoint(ours)
    assert len(typed) > 60
    assert [name for name, is_answered in typed.items() if not is_answered] == []


def test_every_system_has_a_table() -> None:
    sections = {section for section, _, _ in rows(PAGE.read_text())}
    assert sections == {"Megatron-LM", "torchtitan", "DeepSpeed", "Hugging Face Trainer and Accelerate", "Lightning"}
