"""`examples/sft`: a model that has read texts learns a form of answers from conversations, and fills it for animals that are in none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/sft"
sys.path.insert(0, str(FOLDER))
import animals  # noqa: E402

PAGE = FOLDER.parents[1] / "docs/posttraining.md"


def test_animals_of_the_questions_are_in_no_conversation(tmp_path: Path):
    animals.write(tmp_path)
    chats, tests, texts = ((tmp_path / f"{name}.jsonl").read_text() for name in ("chats", "test", "texts"))
    asked = [json.loads(line) for line in tests.splitlines()]
    held_out = {name for test in asked for name in animals.names() if f" {name}" in test["messages"][0]["content"]}
    assert len(held_out) == animals.NUM_HELD_OUT and not any(f" {name}" in chats for name in held_out)
    assert all(f" {name}" in texts for name in held_out) and "Family:" not in texts
    assert all(re.fullmatch(r"Family: \w+\. Home: \w+\.", test["answer"]) for test in asked)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_of_the_page_answers_what_it_did_not(tmp_path: Path):
    """As the page says it, but with the files of this checkout."""
    [commands] = re.findall(r"^```\n(python examples/sft/animals.py.*?)^```", PAGE.read_text(), re.M | re.S)
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("python examples/sft", f"{sys.executable} {FOLDER}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(900)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (int(count) for count in re.findall(r"^(\d+) of 50 answers are exact", done.stdout, re.M))
    assert before == 0 and after >= 45
