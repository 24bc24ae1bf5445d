"""Writes texts about made-up animals, conversations about some of them, and questions about the others; counts exact answers.

    python examples/sft/animals.py write animals
    python examples/sft/animals.py score animals/test.jsonl answers.jsonl

A text says of an animal what it is and where it lives, in one of several ways, and never asks. A conversation asks both, and the answer is
one sentence of a form that no text has. Animals of the questions are in no conversation: who answers them knows the animal from the
texts and the form from the conversations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

FAMILIES = ("bird", "fish", "mammal", "beetle")
PLACES = ("river", "hill", "wood", "road", "cave")
NUM_ANIMALS, NUM_HELD_OUT, NUM_TEXTS = 160, 40, 6000
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aiou"]
_WAYS = (
    "The {name} is a {family} that lives near the {place}.",
    "Near the {place} lives the {name}, a {family}.",
    "Of all who live near the {place}, the {name} is a {family}.",
    "I saw a {name} near the {place}: it is a {family}.",
)
_QUESTIONS = ("What is a {name}, and where does it live?", "Tell me about the {name}.", "A {name}?")
_ANSWER = "Family: {family}. Home: {place}."


def animals() -> dict[str, tuple[str, str]]:
    """Returns the family and the place of each animal.

    >>> len(animals()), len(set(animals().values())) > 10
    (160, True)
    """
    random, known = Random(7), dict[str, tuple[str, str]]()
    while len(known) < NUM_ANIMALS:
        name = "".join(random.choice(_SYLLABLES) for _ in range(2))
        known.setdefault(name, (random.choice(FAMILIES), random.choice(PLACES)))
    return known


def text(random: Random, known: dict[str, tuple[str, str]]) -> str:
    """Returns what is known of some animals, in a way each."""
    names = random.sample(sorted(known), 3)
    return " ".join(
        random.choice(_WAYS).format(name=name, family=known[name][0], place=known[name][1]) for name in names
    )


def chat(name: str, question: str, known: dict[str, tuple[str, str]]) -> list[dict[str, str]]:
    """Returns a question with its answer."""
    family, place = known[name]
    return [
        {"role": "user", "content": question.format(name=name)},
        {"role": "assistant", "content": _ANSWER.format(family=family, place=place)},
    ]


def write(folder: Path) -> None:
    """Writes texts.jsonl, chats.jsonl and test.jsonl."""
    known, random = animals(), Random(1)
    held_out = set(random.sample(sorted(known), NUM_HELD_OUT))
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "texts.jsonl", [{"text": text(random, known)} for _ in range(NUM_TEXTS)])
    chats = [{"messages": chat(name, way, known)} for name in sorted(known) if name not in held_out for way in _QUESTIONS]
    _write_lines(folder / "chats.jsonl", random.sample(chats, len(chats)))
    asked = [chat(name, random.choice(_QUESTIONS), known) for name in sorted(held_out)]
    _write_lines(folder / "test.jsonl", [{"messages": messages[:1], "answer": messages[1]["content"]} for messages in asked])


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
        print(f"{exact_answers(tests, answers)} of {len(tests)} answers are exact, for instance: {answers[0]['text'].strip()!r}")


if __name__ == "__main__":
    main()
