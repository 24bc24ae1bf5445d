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
    for line in held_out:
        opened = line["prompt"].strip()
        for pair in ("()", "[]") * 10:
            opened = opened.replace(pair, "")
        assert opened.translate(str.maketrans("([", ")]"))[::-1] == line["answer"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_example_of_the_page_learns(tmp_path: Path):
    """As the page says it, but with the files of this checkout: on-policy, and with answers of former weights."""
    [commands] = re.findall(r"^```\n(python examples/posttraining/brackets.py.*?)^```", PAGE.read_text(), re.M | re.S)
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("python examples/posttraining", f"{sys.executable} {FOLDER}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(1200)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, stale = (
        float(re.findall(r"correct: ([0-9.]+)", part)[-1]) for part in re.split(r"^\w+:$", done.stdout, flags=re.M)[1:]
    )
    assert before < 0.2 and after > 0.8 and stale > 0.8
    assert (tmp_path / "rewards.svg").stat().st_size > 1000
