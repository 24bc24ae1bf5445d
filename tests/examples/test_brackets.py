"""`examples/posttraining`: a model that closes brackets and goes on learns by rewards to stop."""

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
import brackets  # noqa: E402

PAGE = FOLDER.parents[1] / "docs/posttraining.md"


def test_held_out_prompts_are_in_no_text(tmp_path: Path):
    brackets.main(tmp_path)
    corpus, prompts, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "prompts", "held-out")
    )
    asked = {line["prompt"] for line in held_out}
    assert len(asked) == 200 and not asked & {line["prompt"] for line in prompts}
    assert not asked & {line["text"].partition(" ")[0] + " " for line in corpus}
    for name, among in (("pairs", prompts), ("held-out-pairs", held_out)):
        answers = {line["prompt"]: line["answer"] for line in among}
        for pair in map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines()):
            assert pair["chosen"] == answers[pair["prompt"]]
            assert pair["rejected"].startswith(pair["chosen"]) and pair["rejected"] != pair["chosen"]
    for line in held_out:
        opened = line["prompt"].strip()
        for pair in ("()", "[]") * 10:
            opened = opened.replace(pair, "")
        assert opened.translate(str.maketrans("([", ")]"))[::-1] == line["answer"]


def run_commands(folder: Path, *, having: str) -> str:
    """Runs the commands of the page that have a text, with the files of this checkout; returns what they print."""
    blocks = re.findall(r"^```\n(python examples/posttraining/brackets.py.*?)^```", PAGE.read_text(), re.M | re.S)
    [commands] = [block for block in blocks if having in block]
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("python examples/posttraining", f"{sys.executable} {FOLDER}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True, timeout=scaled(1200)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.docs
@pytest.mark.timeout(1200)
def test_preferences_raise_the_margin_and_teach_to_stop(tmp_path: Path):
    """Also what the page warns of: without the weight of chosen answers these become unlikely, although every pair is ranked right."""
    output = run_commands(tmp_path, having="--objective dpo")
    margins, accuracies = ([float(x) for x in re.findall(rf"{name}: (\S+)", output)] for name in ("margin", "accuracy"))
    before, plain, weighted = (float(x) for x in re.findall(r"correct: ([0-9.]+)", output))
    assert min(margins) > 0.4 and min(accuracies) > 0.95
    assert before < 0.2 and plain < before and weighted > 0.8


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_of_the_page_learns(tmp_path: Path):
    """On-policy, with a critic, and with answers of former weights."""
    output = run_commands(tmp_path, having='"critic ppo ')
    before, after, critic, stale = (
        float(re.findall(r"correct: ([0-9.]+)", part)[-1]) for part in re.split(r"^\w+:$", output, flags=re.M)[1:]
    )
    assert before < 0.2 and min(after, critic, stale) > 0.8
    assert (tmp_path / "rewards.svg").stat().st_size > 1000
