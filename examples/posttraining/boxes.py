"""A game of two turns for reinforcement learning: say what is in a box. Nobody knows without opening it.

    python examples/posttraining/boxes.py FOLDER

corpus.jsonl has texts as a model is pretrained on. Most of them guess; one in seven opens the box first, reads what is in it, and says so.
So the model knows how a box is opened, and nothing tells it that it should. prompts.jsonl and held-out.jsonl have boxes with what is in
them; the environment is the class `Boxes`: `--environment examples/posttraining/boxes.py:Boxes`.
"""

import json
import random
import string
import sys
from pathlib import Path

QUESTION = "What is in box {box}?\n"


class Boxes:
    """The episode of one box, which the prompt's line names. An answer ends with its line: `open` is told what is in the box, and anything
    else is taken for the answer.
    """

    stop = ("\n",)

    def reset(self, record: dict[str, str]) -> None:
        self.content = record["content"]

    def step(self, answer: str) -> tuple[str | None, float, bool]:
        if answer == "open":
            return f"{self.content}\n", 0.0, False
        return None, float(answer == self.content), True


def main(folder: Path) -> None:
    chosen = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "w") as file:
        for _ in range(20_000):
            box, content = chosen.choice(string.ascii_lowercase), chosen.choice(string.digits)
            opened = f"open\n{content}\n" if chosen.randrange(7) == 0 else ""
            file.write(json.dumps({"text": f"{QUESTION.format(box=box)}{opened}{content}\n"}) + "\n")
    boxes = [(box, content) for box in string.ascii_lowercase for content in string.digits]
    chosen.shuffle(boxes)
    for name, part in (("held-out", boxes[:60]), ("prompts", boxes[60:])):
        with open(folder / f"{name}.jsonl", "w") as file:
            for box, content in part:
                file.write(json.dumps({"prompt": QUESTION.format(box=box), "content": content}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
