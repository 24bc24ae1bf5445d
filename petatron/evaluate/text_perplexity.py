"""Perplexities of single texts by a model: what a filter of a corpus asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from petatron.data.prompt.prompt_encoder import document_start, prefix_ids
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.language_modeling import TextTask
from petatron.evaluate.score_sequences import max_scored_tokens, score_sequences
from petatron.parallel.forward_sequences import BATCH_TOKENS
from petatron.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class TextPerplexity:
    """exp of the mean loss per token of each text, in windows of the model's context that do not overlap.

    max_tokens: of each text, the first ones; None: all. A text of which no token is predicted has the perplexity 1.
    """

    model: ParallelModel
    tokenizer: Tokenizer
    window: int
    max_tokens: int | None = None
    batch_tokens: int = BATCH_TOKENS

    @classmethod
    def of(
        cls, model: ParallelModel, tokenizer: Tokenizer, *, seq_length: int, max_tokens: int | None = None
    ) -> TextPerplexity:
        return cls(model, tokenizer, min(seq_length, max_scored_tokens(model) - 1), max_tokens)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        start = document_start(self.tokenizer, prefix_ids(self.tokenizer))
        task = TextTask()
        predicted: list[int] = []
        for index, ids in enumerate(self.tokenizer.encode_batch([_valid_unicode(text) for text in texts])):
            ids = ids[: self.max_tokens] if start is None else [start, *ids[: self.max_tokens]]
            if len(ids) > 1:
                predicted.append(index)
                task.add_document(ids, length=self.window, stride=self.window, extend_last=False)
        losses, counts = [0.0] * len(texts), [0] * len(texts)
        scores = score_sequences(self.model, task.sequences, batch_tokens=self.batch_tokens)
        for document, loss, count in zip(task.documents, *task.loss_sums(scores), strict=True):
            losses[predicted[document]] += loss
            counts[predicted[document]] += count
        return [_perplexity(loss, count) for loss, count in zip(losses, counts)]


def _perplexity(loss: float, count: int) -> float:
    try:
        return math.exp(loss / count) if count else 1.0
    except OverflowError:
        return math.inf


def _valid_unicode(text: str) -> str:
    """Replaces lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()
