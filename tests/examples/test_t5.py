"""`examples/t5`: walks go from square to neighboring square, and an encoder-decoder tells missing ones better than a decoder."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.load_deadline import scaled

FOLDER = Path(__file__).parents[2] / "examples/t5"
sys.path.insert(0, str(FOLDER))
import span_loss  # noqa: E402
import walks  # noqa: E402

PAGE = FOLDER.parents[1] / "docs/t5.md"


def test_walks_go_to_neighbors():
    places = {walks.square(row, column): (row, column) for row in range(walks.SIDE) for column in range(walks.SIDE)}
    assert len(places) == walks.SIDE**2
    names = walks.walk(Random(3)).split()
    assert len(names) == walks.SQUARES_PER_WALK
    for (row, column), (below, right) in zip((places[name] for name in names), (places[name] for name in names[1:])):
        steps = sorted(min(x % walks.SIDE, -x % walks.SIDE) for x in (below - row, right - column))
        assert steps == [0, 1]


def test_missing_words_have_neighbors():
    for number in range(20):
        missing = span_loss.missing_words(30, number)
        assert min(missing) > 0 and max(missing) < 29
        assert all(later - earlier == span_loss.EVERY for earlier, later in itertools.pairwise(missing))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_example_of_the_page_beats_a_decoder(tmp_path: Path):
    """As the page says it, but with the files of this checkout."""
    [commands] = re.findall(r"^```\n(python examples/t5/walks.py.*?)^```", PAGE.read_text(), re.M | re.S)
    script = f'petatron() {{ "{sys.executable}" -m petatron "$@"; }}\n'
    script += commands.replace("python examples/t5", f"{sys.executable} {FOLDER}")
    words = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(900))
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(re.findall(r"^  (word frequencies|decoder|encoder-decoder) +([\d.]+)$", done.stdout, re.M))
    assert float(found["encoder-decoder"]) < float(found["decoder"]) - 0.1 < float(found["word frequencies"]) - 1
    assert json.loads((tmp_path / "walks/held-out.jsonl").read_text().splitlines()[0])["text"]
