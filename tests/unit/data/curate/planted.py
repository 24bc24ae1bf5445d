"""Documents of random words, and copies of them with a Jaccard similarity that is known exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NGRAM = 5
_VOCABULARY = [f"w{number:x}" for number in range(3000)]


def random_text(draw: random.Random, num_shingles: int) -> list[str]:
    return draw.choices(_VOCABULARY, k=num_shingles + NGRAM - 1)


def altered(draw: random.Random, text: Sequence[str], num_replaced: int) -> list[str]:
    """Replaces words that share no 5-gram, so that each changes five: J = (S - 5k) / (S + 5k)."""
    copy = list(text)
    places = range(NGRAM - 1, len(text) - NGRAM + 1)
    step = len(places) // num_replaced
    assert step >= NGRAM
    for index in range(num_replaced):
        copy[places[index * step]] = f"x{draw.getrandbits(40):x}"
    return copy


def pairs(draw: random.Random, count: int, *, shingles_per_word: float) -> Iterable[tuple[list[str], list[str]]]:
    """Yields pairs with one replaced word for so many shingles; 45 is a similarity of 0.8, and 15 one of 0.5."""
    for index in range(count):
        num_replaced = 1 + index % 8
        text = random_text(draw, int(shingles_per_word * num_replaced))
        yield text, altered(draw, text, num_replaced)


def jaccard(first: Sequence[str], second: Sequence[str]) -> float:
    sets = [{tuple(text[at : at + NGRAM]) for at in range(len(text) - NGRAM + 1)} for text in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def write_lines(path: Path, texts: Iterable[str], **record: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text, **record}) + "\n" for text in texts))
    return path


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]
