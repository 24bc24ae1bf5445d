"""`RolloutEngine`: the engine that draws answers, by the weights that are trained, in place and in their layout.

Its pages and captured steps take the memory that training leaves, so each round of drawing opens an engine and closes it, unless
`--rollout-keep-engine` says that memory suffices for both: then only what was computed from former weights is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from petatron.config.schema.run import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.parallel.parallel_model import ParallelModel


class RolloutEngine:
    """Every rank calls its methods, and gets the same completions."""

    def __init__(self, run: RunConfig, model: ParallelModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer, self._keep = model, tokenizer, run.rollout.rollout_keep_engine
        self._options = EngineOptions(
            max_sequences=run.rollout.rollout_sequences,
            max_length=run.model.seq_length + 1,
            copied_weights=False,
            exact=run.train.exact_rollouts,
        )
        self._engine: Engine | None = None

    @contextmanager
    def round(self) -> Iterator[None]:
        """Opens the engine for calls of `complete`, between which the weights stay: what it computed of a prefix is used again."""
        self._open()
        try:
            yield
        finally:
            if not self._keep:
                self.close()

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Sequence[SamplingParams]]
    ) -> list[list[Completion]]:
        """Returns the completions of each prompt, one for each of its sampling parameters; inside of a `round`."""
        assert self._engine is not None, "an engine completes within a round"
        return self._engine.complete_on_all_ranks(prompts, params)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.release()
            self._engine = None

    def _open(self) -> None:
        if self._engine is not None:
            self._engine.forget_prefixes()
            return
        if self._model.mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine asks the driver how much is free
        self._engine = Engine(self._model, self._tokenizer, self._options)
