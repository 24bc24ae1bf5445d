"""What is wrong with the settings that both kinds of masked text have."""

from __future__ import annotations

from petatron.base.errors import Problem

SETTINGS_FLAG = "--dataset-settings"


def masking_problems(*, max_ngram: int, longest_sentence: int, mask_prob: float) -> list[Problem]:
    """Returns every problem."""
    problems: list[Problem] = []
    for name, number in (("max_ngram", max_ngram), ("longest_sentence", longest_sentence)):
        if number < 1:
            problems.append(Problem(SETTINGS_FLAG, f"{name}={number}", "is below 1", "Give a count."))
    if not 0 < mask_prob < 1:
        problems.append(Problem("--mask-prob", str(mask_prob), "is not between 0 and 1", "Use 0.15."))
    return problems
