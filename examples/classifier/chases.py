"""Writes texts about made-up animals that chase each other: many without labels, few with them, and held-out ones.

    python examples/classifier/chases.py chases

A label says to which family the chaser belongs. Who it is follows from the order of words ("was chased by" turns it around), and the
families of most animals from the texts without labels alone, of which every other sentence tells them in passing. So neither the words of
a text without their order nor the few labels are enough.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from math import log
from pathlib import Path
from random import Random

FAMILIES = ("bird", "fish", "mammal")
ANIMALS_PER_FAMILY, SENTENCES = 12, 4
_VERBS = ("chased", "followed", "caught")
_PLACES = ("river", "hill", "wood", "road")
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aiou"]


def animals() -> dict[str, str]:
    """Returns the family of each animal.

    >>> len(animals()), sorted(set(animals().values()))
    (36, ['bird', 'fish', 'mammal'])
    """
    random, families = Random(7), dict[str, str]()
    while len(families) < ANIMALS_PER_FAMILY * len(FAMILIES):
        name = "".join(random.choice(_SYLLABLES) for _ in range(2))
        families.setdefault(name, FAMILIES[len(families) % len(FAMILIES)])
    return families


def chase(random: Random, families: dict[str, str]) -> tuple[str, str]:
    """Returns a sentence, and the family of the chaser."""
    chaser, chased = random.sample(sorted(families), 2)
    verb, place = random.choice(_VERBS), random.choice(_PLACES)
    if random.random() < 0.5:
        return f"the {chaser} {verb} the {chased} near the {place} .", families[chaser]
    return f"the {chased} was {verb} by the {chaser} near the {place} .", families[chaser]


def unlabelled_text(random: Random, families: dict[str, str]) -> str:
    """Returns sentences of which every other tells who rests: the chaser, by its family."""
    return " ".join(
        f"{sentence} the {family} rested ." for sentence, family in (chase(random, families) for _ in range(SENTENCES))
    )


def vocabulary() -> list[str]:
    """Returns the words of all texts, with the special tokens of WordPiece."""
    words = {"the", "was", "by", "near", "rested", ".", *FAMILIES, *_VERBS, *_PLACES, *animals()}
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


def bag_of_words_accuracy(train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> float:
    """Returns the accuracy of naive Bayes, which knows how often each word is in the texts of a label.

    >>> bag_of_words_accuracy([("a b", "x"), ("b c", "y")], [("a", "x"), ("c", "y")])
    1.0
    """
    counts = {label: Counter[str]() for _, label in train}
    for text, label in train:
        counts[label].update(text.split())
    words = {word for count in counts.values() for word in count}

    def score(text: str, label: str) -> float:
        total = sum(counts[label].values()) + len(words)
        return sum(log((counts[label][word] + 1) / total) for word in text.split())

    return sum(max(sorted(counts), key=lambda label: score(text, label)) == right for text, right in test) / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unlabelled", type=int, default=4000)
    parser.add_argument("--labelled", type=int, default=120)
    parser.add_argument("--held-out", type=int, default=600)
    options = parser.parse_args()
    random, families = Random(1), animals()
    options.folder.mkdir(parents=True, exist_ok=True)
    labelled = [chase(random, families) for _ in range(options.labelled + options.held_out)]
    train, test = labelled[: options.labelled], labelled[options.labelled :]
    files = {"train": train, "test": test}
    for name, pairs in files.items():
        lines = [json.dumps({"text": text, "label": family}) for text, family in pairs]
        (options.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    lines = [json.dumps({"text": unlabelled_text(random, families)}) for _ in range(options.unlabelled)]
    (options.folder / "unlabelled.jsonl").write_text("\n".join(lines) + "\n")
    (options.folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    print(f"accuracy of the words without their order, of {len(test)} texts: {bag_of_words_accuracy(train, test):.3f}")


if __name__ == "__main__":
    main()
