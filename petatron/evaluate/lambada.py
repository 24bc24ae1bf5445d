"""LAMBADA: the last word of a passage, which only the whole passage tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.data.prompt.prompt_encoder import with_bos
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.confidence_interval import Estimate, accuracy_estimate, perplexity, ratio_estimate
from petatron.evaluate.eval_task import ContextLimits, ScoredTask, truncate_left
from petatron.evaluate.examples_file import ExampleError, read_examples, text_field
from petatron.evaluate.score_sequences import SequenceScore


@dataclass(slots=True)
class LambadaTask(ScoredTask):
    """An example is correct if each token of its last word is the most likely one."""

    num_targets: list[int] = field(default_factory=list)

    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        lasts = [-count for count in self.num_targets]
        correct = [bool(score.greedy[last:].all()) for score, last in zip(scores, lasts, strict=True)]
        losses = [-float(score.logprobs[last:].sum()) for score, last in zip(scores, lasts, strict=True)]
        estimates = {
            "accuracy": accuracy_estimate(correct),
            "perplexity": ratio_estimate(losses, [1.0] * len(losses), perplexity),
        }
        return estimates, {"examples": len(correct), "correct": sum(correct)}


def read_lambada(
    path: Path,
    tokenizer: Tokenizer,
    limits: ContextLimits,
    *,
    strict: bool = False,
    limit: int | None = None,
    bos: Sequence[int] = (),
) -> LambadaTask:
    """Reads JSON lines with a "text", after `bos`. Strict predicts the whole last word; else its last token, as the text is tokenized."""
    parse = _split_strict if strict else lambda record: (text_field(record, "text"), "")
    pairs = read_examples(path, parse, limit=limit)
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    last_words = tokenizer.encode_batch([word for _, word in pairs])
    task, truncated = LambadaTask(), 0
    for number, (context, word) in enumerate(zip(contexts, last_words, strict=True), start=1):
        num_targets = len(word) if strict else 1
        ids, cut = truncate_left(with_bos([*context, *word], bos), limits.max_tokens)
        if len(ids) <= num_targets:
            raise DataError(
                f"{path}, example {number}: nothing is left before the last word. Give passages of two tokens or more."
            )
        truncated += cut
        task.sequences.append(ids)
        task.num_targets.append(num_targets)
    if truncated:
        count = count_with_noun(truncated, "passage")
        task.notes.append(f"{count} cut from the left to {limits.max_tokens:,} tokens")
    return task


def _split_strict(record: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the text before the last word, and that word after a space."""
    text = text_field(record, "text")
    word = text.split()[-1]
    before = text[: text.rindex(word)].strip()
    if not before:
        raise ExampleError('"text" has only one word')
    return before, f" {word}"
