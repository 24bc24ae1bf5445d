"""Counts the tokens of answers for the `usage` field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.infer.split_answer_parts import AnswerSplitter, count_reasoning_tokens
from petatron.serve.token_texts import TokenTexts


def usage(
    prompt_tokens: int, completions: Sequence[Completion], *, n: int = 1, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """n: answers to each prompt, which counts once. reasoning_tokens: of all answers; None: the route tells none apart."""
    new = sum(len(completion.ids) for completion in completions)
    prompts = (completions[begin : begin + n] for begin in range(0, len(completions), n))
    # The first answer computes what is not cached, and the others find its prompt in the cache.
    cached = sum(min(completion.cached_tokens for completion in answers) for answers in prompts)
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_tokens is None:
        return counts
    return {**counts, "completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}


class RunningUsage:
    """Counts of a stream's answers so far, for each of its events, as vLLM's `continuous_usage_stats` asks for."""

    def __init__(self) -> None:
        self._new: Counter[int] = Counter()

    def after(self, prompt_tokens: int, index: int, event: TokenEvent | None) -> dict[str, int]:
        """Returns the counts of one answer with an event of its own; None: before the first."""
        self._new[index] += event is not None and event.token is not None
        new = self._new[index]
        return {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}


def reasoning_tokens_of(completion: Completion, splitter: AnswerSplitter, texts: TokenTexts) -> int:
    """Returns how many tokens of an answer are reasoning, as its splitter tells it apart."""
    parser = splitter.reasoning
    if parser is None:
        return 0
    ids = completion.ids[:-1] if isinstance(completion.stop, int) else completion.ids
    return count_reasoning_tokens([texts.bytes_of(token) for token in ids], parser.form, inside=parser.inside)
