"""Writes the data of a small task for preferences and reinforcement learning: close all brackets that are open, then stop.

    python examples/posttraining/brackets.py FOLDER

corpus.jsonl has texts as a model is pretrained on: brackets, a space, the ones that close them, and then up to six brackets too many, none
in one text of seven. So the model that learns from it knows how to close brackets, and not when to stop. prompts.jsonl and held-out.jsonl
have prompts with the right answer; none of the held-out prompts is in the others. pairs.jsonl and held-out-pairs.jsonl have for some of
these prompts the right answer, which is chosen, and the same with brackets too many, which is rejected.
"""

import json
import random
import sys
from pathlib import Path

CLOSING = {"(": ")", "[": "]"}


def make_prompt(chosen: random.Random) -> tuple[str, str]:
    """Returns brackets of which two to four are open at the end, and those that close them."""
    while True:
        text, opened = "", list[str]()
        for _ in range(chosen.randint(3, 10)):
            if opened and chosen.random() < 0.3:
                text += CLOSING[opened.pop()]
            else:
                opened.append(chosen.choice("(["))
                text += opened[-1]
        if 2 <= len(opened) <= 4:
            return text, "".join(CLOSING[bracket] for bracket in reversed(opened))


def main(folder: Path) -> None:
    chosen = random.Random(0)
    answers = dict(make_prompt(chosen) for _ in range(20_000))
    prompts = list(answers)
    held_out, others = prompts[:200], prompts[200:]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "w") as file:
        for _ in range(20_000):
            prompt = chosen.choice(others)
            more = "".join(chosen.choice("()[]") for _ in range(chosen.randint(0, 6)))
            file.write(json.dumps({"text": f"{prompt} {answers[prompt]}{more}"}) + "\n")
    for name, part in (("prompts", others), ("held-out", held_out)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for prompt in part:
                file.write(json.dumps({"prompt": f"{prompt} ", "answer": answers[prompt]}) + "\n")
    for name, part in (("pairs", others[:2000]), ("held-out-pairs", held_out)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for prompt in part:
                more = "".join(chosen.choice("()[]") for _ in range(chosen.randint(1, 6)))
                answer = answers[prompt]
                pair = {"prompt": f"{prompt} ", "chosen": answer, "rejected": answer + more}
                file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
