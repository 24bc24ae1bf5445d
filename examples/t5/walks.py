"""Writes texts about walks through a town, from square to neighboring square, as JSON lines: a corpus and some held-out texts.

    python examples/t5/walks.py walks

The square after another is one of its four neighbors, so nobody can tell it from what came before. The squares before and after a missing
one leave one or two that lie between them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

SIDE, SQUARES_PER_WALK = 6, 42
_FIRST = ("ba", "do", "fi", "ge", "ko", "lu")
_SECOND = ("bel", "dan", "fur", "gos", "kim", "lor")


def square(row: int, column: int) -> str:
    """Returns the name of a square.

    >>> square(0, 0), square(7, 1)
    ('babel', 'dodan')
    """
    return _FIRST[row % SIDE] + _SECOND[column % SIDE]


def walk(random: Random) -> str:
    """Returns the names of the squares of a walk, in their order."""
    row, column = random.randrange(SIDE), random.randrange(SIDE)
    names = []
    for _ in range(SQUARES_PER_WALK):
        names.append(square(row, column))
        down, right = random.choice(((1, 0), (-1, 0), (0, 1), (0, -1)))
        row, column = row + down, column + right
    return " ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--walks", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=200)
    options = parser.parse_args()
    random = Random(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("corpus", options.walks), ("held-out", options.held_out)):
        lines = [json.dumps({"text": walk(random)}) for _ in range(count)]
        (options.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
