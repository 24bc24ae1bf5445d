"""The engine of models that read texts and continue none, as encoders do: a request is a text, and its answer one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petatron.base.errors import DataError
from petatron.infer.encoder.pooled_states import pooled_states
from petatron.infer.reading_engine import ReadingEngine
from petatron.infer.sampling_params import PoolingName, SamplingParams


class EncoderEngine(ReadingEngine):
    """Embeds any number of texts. Not thread-safe: one thread drives it, at rank 0; the other ranks `follow`.

    >>> import petatron
    >>> flags = ["--model-type", "bert", "--mock-data", "--lr", "1e-3", "--train-iters", "2"]
    >>> run = petatron.load("tiny-llama", flags)
    >>> engine = EncoderEngine(petatron.build_model(run, petatron.launch(run)), None, None, reads_only="It is an encoder.")
    >>> request = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=0, pooling="first"))
    >>> [event.finish_reason for event in engine.step()], len(engine.take(request).pooled) == run.config.model.hidden_size
    (['length'], True)
    """

    def _asked(self, prompt_ids: Sequence[int], params: SamplingParams) -> PoolingName:
        if params.pooling is None:
            raise DataError(self.reads_only)
        return params.pooling

    def _read(self, sequences: Sequence[tuple[list[int], Any]]) -> list[dict[str, Any]]:
        vectors: list[dict[str, Any]] = [{}] * len(sequences)
        for pooling in dict.fromkeys(kind for _, kind in sequences):
            places = [place for place, (_, kind) in enumerate(sequences) if kind == pooling]
            pooled = pooled_states(self._model, [sequences[place][0] for place in places], pooling=pooling)
            for place, vector in zip(places, pooled, strict=True):
                vectors[place] = {"pooled": vector}
        return vectors
