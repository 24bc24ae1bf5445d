"""Writes texts about made-up animals, conversations about some of them, and questions about others; counts exact answers.

    python examples/sft/animals.py write animals
    python examples/sft/animals.py score animals/test.jsonl answers.jsonl

A text says of a few animals what they are and where they live, twice and in different ways. In a conversation the user says it of one
animal, and the answer sums it up in a form that no text has. Animals of the questions are in no conversation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

FAMILIES = ("bird", "fish", "mammal", "beetle")
PLACES = ("river", "hill", "wood", "road", "cave")
NUM_NAMES, NUM_HELD_OUT, NUM_TEXTS, NUM_CHATS = 200, 50, 5000, 1000
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aiou"]
_WAYS = (
    "The {name} is a {family} that lives near the {place}.",
    "Near the {place} lives the {name}, a {family}.",
    "Of all who live near the {place}, the {name} is a {family}.",
    "I saw a {name} near the {place}: it is a {family}.",
)
_ANSWER = "Family: {family}. Home: {place}."


class Animal(NamedTuple):
    name: str
    family: str
    place: str


def names() -> list[str]:
    """Returns the names of all animals.

    >>> len(names()), len(set(names()))
    (200, 200)
    """
    return sorted(Random(7).sample([first + second for first in _SYLLABLES for second in _SYLLABLES], NUM_NAMES))


def animal(random: Random, name: str) -> Animal:
    return Animal(name, random.choice(FAMILIES), random.choice(PLACES))


def text(random: Random, known: Sequence[str]) -> str:
    """Returns what two animals are, each told twice."""
    told = [animal(random, name) for name in random.sample(known, 2)]
    return " ".join(random.choice(_WAYS).format(**each._asdict()) for each in random.sample(told * 2, 4))


def chat(random: Random, name: str) -> list[dict[str, str]]:
    """Returns what a user says of an animal, and the answer."""
    told = animal(random, name)
    return [
        {"role": "user", "content": random.choice(_WAYS).format(**told._asdict())},
        {"role": "assistant", "content": _ANSWER.format(**told._asdict())},
    ]


def write(folder: Path) -> None:
    """Writes texts.jsonl, chats.jsonl and test.jsonl."""
    known, random = names(), Random(1)
    held_out = random.sample(known, NUM_HELD_OUT)
    seen = [name for name in known if name not in held_out]
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "texts.jsonl", [{"text": text(random, known)} for _ in range(NUM_TEXTS)])
    _write_lines(folder / "chats.jsonl", [{"messages": chat(random, random.choice(seen))} for _ in range(NUM_CHATS)])
    asked = [chat(random, name) for name in held_out]
    _write_lines(
        folder / "test.jsonl", [{"messages": [question], "answer": answer["content"]} for question, answer in asked]
    )


def exact_answers(tests: Sequence[dict], answers: Sequence[dict]) -> int:
    """Returns how many answers are exactly those of the tests; both are in the order of the file.

    >>> exact_answers([{"answer": "a"}, {"answer": "b"}], [{"text": " a"}, {"text": "c"}])
    1
    """
    return sum(test["answer"] == answer["text"].strip() for test, answer in zip(tests, answers, strict=True))


def _write_lines(path: Path, records: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("folder", type=Path)
    score = commands.add_parser("score")
    score.add_argument("tests", type=Path)
    score.add_argument("answers", type=Path)
    args = parser.parse_args()
    if args.command == "write":
        write(args.folder)
    else:
        tests, answers = _read_lines(args.tests), _read_lines(args.answers)
        first = answers[0]["text"].strip()
        print(f"{exact_answers(tests, answers)} of {len(tests)} answers are exact, for instance: {first!r}")


if __name__ == "__main__":
    main()
