"""The engine of recommenders: a request is the history of a user, and its answer the best items after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petatron.base.errors import DataError
from petatron.infer.reading_engine import ReadingEngine
from petatron.infer.recommend.best_items import History, best_items, needs_times
from petatron.infer.sampling_params import SamplingParams


class RecommenderEngine(ReadingEngine):
    """Recommends items after any number of histories. Not thread-safe: one thread drives it, at rank 0; the other ranks `follow`.

    >>> import petatron
    >>> flags = "--model-type recommender --vocab-size 20 --mock-data --lr 1e-3 --train-iters 2".split()
    >>> run = petatron.load("tiny-llama", flags)
    >>> engine = RecommenderEngine(petatron.build_model(run, petatron.launch(run)), None, None, reads_only="It recommends items.")
    >>> request = engine.submit([3, 5], SamplingParams(max_new_tokens=0, best_items=4))
    >>> _ = engine.step()
    >>> len(engine.take(request).items)
    4
    """

    def _asked(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Any]:
        if params.best_items is None:
            raise DataError(self.reads_only)
        if needs_times(self._model) and len(params.history_times) != len(prompt_ids):
            raise DataError(
                f"This model reads the times of interactions: {len(params.history_times)} were given for {len(prompt_ids)} items. Give one "
                "for each, in seconds."
            )
        return [params.history_times, params.best_items, params.leave_out_history]

    def _read(self, sequences: Sequence[tuple[list[int], Any]]) -> list[dict[str, Any]]:
        histories = [History(ids, *asked) for ids, asked in sequences]
        return [{"items": items} for items in best_items(self._model, histories)]
