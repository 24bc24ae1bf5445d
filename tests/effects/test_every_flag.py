"""Every flag of Megatron's that is accepted has an effect, shown by two runs that differ in it, or by the test that is named."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest

import tests
from petatron.cli.main import main
from petatron.config.flags.megatron_table import megatron_flags
from tests.effects.observe import CORPUS, Observed, differ, observe

_LINES = [
    line for line in Path(__file__).with_name("flag_effects.txt").read_text().splitlines() if line.startswith("--")
]
RUNS = [tuple(part.strip() for part in line.split("|", 2)) for line in _LINES if " -> " not in line]
SHOWN_ELSEWHERE = dict(line.split(" -> ") for line in _LINES if " -> " in line)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = (json.dumps({"text": "hello world " * (number % 3) + str(number)}) for number in range(60))
    (folder / "corpus.jsonl").write_text("\n".join(texts))
    files = [
        "--input",
        str(folder / "corpus.jsonl"),
        "--output-prefix",
        str(folder / CORPUS.removesuffix("_text_document")),
    ]
    assert (
        main(["data", "preprocess", *files, "--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]) == 0
    )
    return folder


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, corpus: Path):
    """Runs without the flag, of which many lines share one."""
    return functools.cache(lambda words: observe(shlex.split(words), tmp_path_factory.mktemp("without"), corpus))


@pytest.mark.parametrize(("flag", "words", "effect"), RUNS, ids=lambda text: text if text.startswith("--") else "")
def test_a_flag_changes_what_it_says(flag: str, words: str, effect: str, corpus: Path, baseline, tmp_path: Path):
    without, with_flag = baseline(words), observe([*shlex.split(words), *shlex.split(flag)], tmp_path, corpus)
    assert is_seen(effect, without, with_flag), f"{flag} changes no {effect}"


def is_seen(effect: str, without: Observed, with_flag: Observed) -> bool:
    """Whether the effect of the table is seen in the second run and not in the first."""
    what, _, pattern = effect.partition(" ")
    if what == "numbers":
        return differ(without.numbers, with_flag.numbers)
    if what == "lines":
        matched = [
            [match.group() for match in map(re.compile(pattern).search, run.text) if match]
            for run in (without, with_flag)
        ]
        return matched[0] != matched[1]
    names = {"text": "text", "files": "files", "saved": "checkpoint", "trace": "trace"}[what]
    first, second = (with_flag, without) if pattern.startswith("!") else (without, with_flag)
    search = re.compile(pattern.removeprefix("!")).search
    return not any(map(search, getattr(first, names))) and any(map(search, getattr(second, names)))


def test_every_flag_that_works_has_its_effect_shown():
    works = {flag for flag, answer in megatron_flags().items() if answer.kind == "works"}
    shown = {flag.split()[0] for flag, _, _ in RUNS} | set(SHOWN_ELSEWHERE)
    assert works <= shown, f"no effect is shown of {sorted(works - shown)}"
    assert shown <= works, f"the table of flags does not have {sorted(shown - works)}"


@pytest.mark.parametrize("flag", SHOWN_ELSEWHERE)
def test_a_test_that_is_named_is_there(flag: str):
    path, _, name = SHOWN_ELSEWHERE[flag].partition("::")
    assert f"def {name}(" in (Path(tests.__file__).parent / path).read_text()


def test_a_flag_without_effect_is_found(corpus: Path, baseline, tmp_path: Path):
    without, again = baseline(""), observe([], tmp_path, corpus)
    effects = (
        "numbers",
        r"lines iteration +\d+/",
        "lines memory: .*",
        "text offload",
        "files progress",
        "saved !exp_avg",
    )
    assert not any(is_seen(effect, without, again) for effect in effects)
