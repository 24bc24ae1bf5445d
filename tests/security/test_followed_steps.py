"""`serve --watch` and `checkpoint verify`: sound weights whose manifest, digest included, says what is not so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petatron.checkpoint.inspect.verify_checkpoint import verify_checkpoint
from petatron.serve.http.follow_training_run import newest_sound_step, step_properties
from tests.heard import heard
from tests.longform import diagonal
from tests.unit.checkpoint.rewriting import rewrite_manifest

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v4"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is served at its step 3 while step 5 comes."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("step-00000003", "step-00000005"):
        shutil.copytree(GOLDEN / "step-00000003", folder / name)
    rewrite_manifest(folder / "step-00000005", lambda body: body.update(step=5))
    rewrite_manifest(folder / "step-00000005", lambda body: facts_of(body)["progress"].update(iteration=5))
    return folder


def facts_of(body: dict[str, Any]) -> dict[str, Any]:
    return body["facts"]["facts"]


def served(run: Path) -> tuple[int | None, list[str]]:
    rejected: set[int] = set()
    with heard("petatron.serve.http.follow_training_run") as said:
        found = newest_sound_step(run, after=3, rejected=rejected, served_properties=step_properties(run, 3))
    assert rejected == (set() if found else {5})
    return (found[0] if found else None), said


def test_a_step_that_says_what_is_so_is_served(run: Path) -> None:
    assert served(run) == (5, [])


WRONG: dict[str, tuple[Change, str]] = {
    "iteration": (lambda facts: facts["progress"].update(iteration=99), "step 5 was saved at iteration 99"),
    "no iteration": (lambda facts: facts["progress"].pop("iteration"), "says no number of iteration"),
    "updates": (lambda facts: facts["progress"].update(updates=77), "updates 77 of iteration 5"),
    "negative": (lambda facts: facts["progress"].update(consumed_samples=-4), "says no number of consumed_samples"),
    "a list": (lambda facts: facts.update(progress=[1]), "says no number of iteration"),
    "layers": (lambda facts: facts["model"].update(num_layers=7), "num_layers is"),
    "settings": (lambda facts: facts["config"]["model"].update(rotary_base=3.0, num_layers=9), "num_layers is 2"),
    "no model": (lambda facts: facts.update(model=None), "says nothing of the model"),
}


@diagonal(2)
@pytest.mark.parametrize("name", WRONG)
def test_facts_that_do_not_fit_the_step_are_refused(run: Path, name: str) -> None:
    change, words = WRONG[name]
    rewrite_manifest(run / "step-00000005", lambda body: change(facts_of(body)))
    assert words in " ".join(finding.text for finding in verify_checkpoint(run / "step-00000005").findings)
    step, said = served(run)
    assert step is None and len(said) == 1 and "is not served" in said[0]


OTHER_RUN: dict[str, tuple[Change, str]] = {
    "facts left out": (lambda facts: [facts.pop(key) for key in ("progress", "config")], "the run's config, progress"),
    "settings left out": (lambda facts: facts["model"].pop("hidden_size"), "does not say hidden_size of the model"),
    "earlier": (
        lambda facts: facts["progress"].update(consumed_samples=3, update_samples=2),
        "says 3 consumed samples",
    ),
}


@pytest.mark.parametrize("name", OTHER_RUN)
def test_a_step_of_another_run_does_not_follow(run: Path, name: str) -> None:
    change, words = OTHER_RUN[name]
    rewrite_manifest(run / "step-00000005", lambda body: change(facts_of(body)))
    step, said = served(run)
    assert step is None and words in said[0]


def test_facts_of_other_programs_are_theirs(run: Path) -> None:
    for path in run.iterdir():
        rewrite_manifest(path, lambda body: body["facts"].update(facts={"progress": "half", "note": [1]}))
    assert verify_checkpoint(run / "step-00000005").is_valid and served(run) == (5, [])
