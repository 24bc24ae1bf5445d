"""Every command and every Python block of the README and the guides runs, in order, in one empty folder per page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
