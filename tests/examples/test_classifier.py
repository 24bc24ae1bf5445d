"""`examples/classifier`: a label follows from the order of words, and a model that has read texts without labels learns it from few."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/classifier"
sys.path.insert(0, str(FOLDER))
import chases  # noqa: E402

PAGE = FOLDER.parents[1] / "docs/finetune-heads.md"


def test_a_label_is_the_family_of_the_chaser():
    families, random = chases.animals(), Random(1)
    for _ in range(50):
        text, family = chases.chase(random, families)
        assert set(text.split()) <= set(chases.vocabulary())
        before, verb, after = re.split(r" (was \w+ by|chased|followed|caught) ", text)
        chaser = (after if verb.endswith("by") else before).split()[1]
        assert families[chaser] == family


def test_words_without_order_are_not_enough():
    families, random = chases.animals(), Random(2)
    texts = [chases.chase(random, families) for _ in range(5000)]
    assert chases.bag_of_words_accuracy(texts[:4000], texts[4000:]) < 0.72


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_of_the_page_beats_words_and_a_model_that_read_nothing_else(tmp_path: Path):
    """As the page says it, but with the files of this checkout."""
    [commands] = re.findall(r"^```\n(python examples/classifier/chases.py.*?)^```", PAGE.read_text(), re.M | re.S)
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("python examples/classifier", f"{sys.executable} {FOLDER}")
    words = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(900))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the head is new: task_head.out.weight" in done.stdout + done.stderr
    of_words = float(re.findall(r"without their order, of 600 texts: ([\d.]+)", done.stdout)[0])
    [row] = re.findall(r"^labels  accuracy +([\d.]+) \S+ \S+ +([\d.]+)", done.stdout, re.M)
    fine_tuned, from_scratch = map(float, row)
    assert fine_tuned > 0.8 > 0.7 > max(of_words, from_scratch)
