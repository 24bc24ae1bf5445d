"""`examples/posttraining/boxes.py`: a model that guesses what is in a box learns to open it first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/posttraining"
sys.path.insert(0, str(FOLDER))
import boxes  # noqa: E402

PAGE = FOLDER.parents[1] / "docs/posttraining.md"


def test_a_box_is_opened_or_guessed(tmp_path: Path):
    game = boxes.Boxes()
    game.reset({"content": "7"})
    assert game.step("open") == ("7\n", 0.0, False) and game.step("7") == (None, 1.0, True)
    assert game.step("4") == (None, 0.0, True)
    boxes.main(tmp_path)
    prompts, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "held-out")
    )
    texts = [json.loads(line)["text"].splitlines() for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    opened = [lines for lines in texts if lines[1] == "open"]
    assert 0.12 < len(opened) / len(texts) < 0.17 and all(lines[2] == lines[3] for lines in opened)
    assert len(prompts) + len(held_out) == 260 and not any(line in prompts for line in held_out)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_of_the_page_learns(tmp_path: Path):
    [commands] = re.findall(r"^```\n(python examples/posttraining/boxes.py.*?)^```", PAGE.read_text(), re.M | re.S)
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("examples/posttraining", str(FOLDER)).replace("python ", f"{sys.executable} ", 1)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(1200)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, *_, after = (float(x) for x in re.findall(r"correct: ([0-9.]+)", done.stdout))
    assert before < 0.4 and after > 0.8
