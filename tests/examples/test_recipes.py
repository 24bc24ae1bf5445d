"""Recipes of docs/recipes: each passes the check at its full number of ranks, and the page says what the planner predicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from petatron.validate import load_config
from tests.examples.example_scripts import ROOT
from tests.examples.memory_plan import planned

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.yaml"))
NAMES = "llama2-7b llama2-13b llama2-70b llama3-405b nemotron4-340b deepseek-v3 gpt-oss-120b".split()
DEVICE_GB, RESERVE_GB = 80.0, 2.0


def row(name: str) -> list[str]:
    """Returns the cells of a recipe in the table of the page."""
    match = re.search(rf"^\| \[{name}\]\(recipes/{name}\.yaml\) \| (.*) \|$", PAGE, re.MULTILINE)
    assert match is not None, f"{name} has no row in docs/recipes.md"
    return match[1].split(" | ")


def test_every_recipe_is_known():
    assert sorted(path.stem for path in RECIPES) == sorted(NAMES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_and_fits_at_its_full_size(path: Path):
    loaded = load_config(["--mock-data"], preset=path.stem, files=[path])
    assert not loaded.notices
    plan = planned([path.stem, "--config", str(path)])
    parallel = loaded.config.parallel
    assert row(path.stem) == [
        f"{parallel.world_size:,}",
        str(parallel.tensor_model_parallel_size),
        str(parallel.pipeline_model_parallel_size),
        str(parallel.context_parallel_size),
        str(parallel.expert_model_parallel_size),
        str(parallel.data_parallel_size),
        f"{plan.gigabytes} GB",
        plan.bubble,
    ]
    assert float(plan.gigabytes) <= DEVICE_GB - RESERVE_GB


def test_the_toy_of_the_page_passes():
    line = next(line for line in PAGE.splitlines() if " --toy " in line)
    preset, *flags = line.removeprefix("petatron train ").replace("docs/recipes/", f"{ROOT}/docs/recipes/").split()
    config = load_config(flags, preset=preset).config
    assert config.parallel.world_size == 2 and config.model.num_layers == 4


def test_what_the_405b_recipe_pins_is_on_the_page():
    plan = planned(["llama3-405b", "--config", str(ROOT / "docs" / "recipes" / "llama3-405b.yaml")])
    per_node = 8 * float(plan.pinned_gigabytes)
    assert f"{plan.pinned_gigabytes} GB pinned per rank, {per_node:.0f} GB per node" in PAGE


@pytest.mark.parametrize(
    ("flags", "gigabytes"),
    [
        ("llama2-7b --micro-batch-size 2", "76.0"),
        ("llama2-70b --pp 2 --dp 8", "80.1"),
        ("llama2-70b --tp 8 --pp 2", "46.5"),
        ("gpt-oss-120b --pp 1 --ep 64 --dp 64", "66.1"),
        ("gpt-oss-120b --num-virtual-stages-per-pipeline-rank 3", "79.4"),
    ],
)
def test_alternatives_that_the_page_names_need_what_it_says(flags: str, gigabytes: str):
    preset, *changes = flags.split()
    plan = planned([preset, "--config", str(ROOT / "docs" / "recipes" / f"{preset}.yaml"), *changes])
    assert plan.gigabytes == gigabytes and f"{gigabytes} GB" in PAGE
