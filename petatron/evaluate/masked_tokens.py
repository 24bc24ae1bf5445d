"""Masked tokens of a text: how many an encoder fills in right, beside who always says the most frequent one.

Of the tokens of a text 15 % are masked, drawn once: the same for every model with the same tokenizer. All of them are masks, as those of
`petatron generate --fill-mask`; in training some are other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.data.prompt.prompt_encoder import surrounding_ids
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.confidence_interval import Estimate, perplexity, ratio_estimate
from petatron.evaluate.eval_task import ContextLimits, ScoredTask
from petatron.evaluate.examples_file import is_json_lines, read_examples, read_text, text_field
from petatron.evaluate.score_sequences import OnProgress, SequenceScore, score_targets
from petatron.parallel.parallel_model import ParallelModel

_SHARE = 0.15


@dataclass(slots=True)
class MaskedTokensTask(ScoredTask):
    """Windows of texts; in each, which places are masked."""

    places: list[list[int]] = field(default_factory=list)
    mask_id: int = 0

    def score(
        self, model: ParallelModel, *, batch_tokens: int, on_progress: OnProgress | None
    ) -> Sequence[SequenceScore]:
        kind = model.spec.config.model_type
        if kind != MASKED_LANGUAGE_MODEL:
            raise DataError(f"This task is for encoders of masked tokens, and the model is a {kind}. Use --task text.")
        pairs = [(self._masked(ids, places), ids) for ids, places in zip(self.sequences, self.places, strict=True)]
        return score_targets(model, pairs, batch_tokens=batch_tokens, on_progress=on_progress)

    def _masked(self, ids: Sequence[int], places: Sequence[int]) -> list[int]:
        inputs = np.array(ids)
        inputs[list(places)] = self.mask_id
        return inputs.tolist()

    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        targets = [[ids[place] for place in places] for ids, places in zip(self.sequences, self.places, strict=True)]
        usual, _ = Counter(token for row in targets for token in row).most_common(1)[0]
        counts = [len(places) for places in self.places]
        right = [float(score.greedy[places].sum()) for score, places in zip(scores, self.places, strict=True)]
        losses = [-float(score.logprobs[places].sum()) for score, places in zip(scores, self.places, strict=True)]
        unigram = [float(row.count(usual)) for row in targets]
        estimates = {
            "accuracy": ratio_estimate(right, counts),
            "unigram_accuracy": ratio_estimate(unigram, counts),
            "loss": ratio_estimate(losses, counts),
            "perplexity": ratio_estimate(losses, counts, perplexity),
        }
        return estimates, {"masked": sum(counts), "correct": int(sum(right)), "tokens": sum(map(len, self.sequences))}


def read_masked_tokens(
    path: Path, tokenizer: Tokenizer, limits: ContextLimits, *, limit: int | None = None
) -> MaskedTokensTask:
    """Reads JSON lines with a "text", or a text file, and masks its tokens; long texts are cut into windows."""
    if "mask" not in tokenizer.special_ids:
        raise DataError(f"The tokenizer {tokenizer.name} names no mask. Name mask_token in its tokenizer_config.json.")
    is_json = is_json_lines(path)
    texts = (
        read_examples(path, lambda record: text_field(record, "text"), limit=limit) if is_json else [read_text(path)]
    )
    before, after = surrounding_ids(tokenizer)
    room, skipped = limits.window - len(before) - len(after), 0
    if room < 1:
        raise DataError(f"A window of {count_with_noun(limits.window, 'token')} has no room for a text.")
    task = MaskedTokensTask(mask_id=tokenizer.special_ids["mask"])
    for number, ids in enumerate(tokenizer.encode_batch(texts)):
        skipped += not ids
        for start in range(0, len(ids), room):
            window = ids[start : start + room]
            task.sequences.append([*before, *window, *after])
            task.places.append([len(before) + place for place in _draw_places(len(window), seed=(number, start))])
    if not task.sequences:
        raise DataError(f"{path} has no text with a token to mask.")
    if skipped:
        task.notes.append(f"{count_with_noun(skipped, 'text')} without a token left out")
    return task


def _draw_places(count: int, *, seed: Sequence[int]) -> Iterator[int]:
    """Yields places of a window to mask, one at least, in their order."""
    number = max(1, round(_SHARE * count))
    yield from sorted(np.random.default_rng(seed).choice(count, number, replace=False).tolist())
