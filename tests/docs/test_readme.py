"""Every command and every Python block of the README and the guides runs, in order, in one empty folder per page."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from petatron.models.hf.families import FAMILIES
from petatron.validate import load_config
from tests.load_deadline import scaled

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(page: Path) -> list[tuple[str, str]]:
    return [(language, text) for language, text in BLOCK.findall(page.read_text())]


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=lambda p: p.name)
def test_commands_run(page: Path, tmp_path: Path):
    command = tmp_path / "bin" / "petatron"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m petatron "$@"\n')
    command.chmod(0o755)
    (command.parent / "python").symlink_to(sys.executable)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for language, text in _blocks(page):
        words = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(200))
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", [p for p in PAGES if "from petatron" in p.read_text()], ids=lambda p: p.name)
def test_what_the_python_blocks_import_exists(page: Path):
    """The blocks themselves run in `make test-docs`; a module that was renamed shows here, in a second."""
    for language, text in _blocks(page):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "petatron":
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):  # a submodule
                        importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def _anchors(page: Path) -> set[str]:
    """The names under which GitHub links to the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.M
    )
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_headings_lead_to_a_heading(page: Path):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert anchor in _anchors(linked), f"{page.name} links to {target}#{anchor}, which is no heading"


def test_the_readme_counts_the_families():
    counted = re.search(r"(\d+) Hugging Face families", (ROOT / "README.md").read_text())
    assert counted is not None and int(counted[1]) == len(FAMILIES)


def test_the_index_lists_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_command_for_eight_gpus_is_a_run_without_problems():
    command = re.search(
        r"^petatron train (llama3-8b .*?)```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert command is not None
    preset, *flags = command[1].replace("\\\n", " ").split()
    loaded = load_config(flags, preset=preset)
    assert loaded.config.parallel.world_size == 8 and not loaded.notices


def test_results_in_the_readme_are_those_of_the_benchmarks():
    """They are copies: who measures again sees which to copy."""
    results = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = [line.rstrip("|").rstrip() for line in (ROOT / "README.md").read_text().splitlines() if "tok/s" in line]
    assert len(rows) == 7
    for row in rows:
        assert row in results, row
