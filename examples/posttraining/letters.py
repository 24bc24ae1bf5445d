"""A game of several turns for reinforcement learning: guess a letter; each wrong guess is told whether the letter is earlier or later.

    python examples/posttraining/letters.py FOLDER

corpus.jsonl has games as a model is pretrained on, whose guesses are random: it learns how a game is written, and nothing of hints.
prompts.jsonl has a game for each letter. The environment is the class `Letters`: `--environment examples/posttraining/letters.py:Letters`.
"""

import json
import random
import sys
from pathlib import Path

MAX_GUESSES, LETTERS = 4, "abcdefghijklmno"
PROMPT = "Which letter?\n"


class Letters:
    """The episode of one letter, which the prompt's line names. An answer ends with its line."""

    stop = ("\n",)

    def reset(self, record: dict[str, str]) -> None:
        self.letter = record["letter"]

    def step(self, answer: str) -> tuple[str | None, float, bool]:
        if answer == self.letter:
            return None, 1.0, True
        return hint(answer, self.letter), 0.0, False


def hint(guess: str, letter: str) -> str:
    return "later\n" if guess < letter else "earlier\n"


def random_game(chosen: random.Random) -> str:
    letter, text = chosen.choice(LETTERS), PROMPT
    for _ in range(MAX_GUESSES):
        guess = chosen.choice(LETTERS)
        text += f"{guess}\n"
        if guess == letter:
            break
        text += hint(guess, letter)
    return text


def main(folder: Path) -> None:
    chosen = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "w") as file:
        file.writelines(json.dumps({"text": random_game(chosen)}) + "\n" for _ in range(20_000))
    with open(folder / "prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": PROMPT, "letter": letter}) + "\n" for letter in LETTERS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
