"""`RolloutEngine`: the engine that draws answers, by the weights that are trained: in place, or in another layout (`handover/`).

Its pages take the memory that training leaves. After each round of drawing that is given back, and what was computed from former weights is
forgotten. On NVIDIA GPUs the engine stays with its CUDA graphs, and its pages return to their addresses; elsewhere, or where weights are a
copy that goes as well, the next round opens another engine. `--rollout-keep-engine` says that memory suffices for both. A round may be
inside of another one, whose engine and weights it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch

from petatron.base.releasable_cuda_memory import can_release_memory
from petatron.config.schema.run import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh import collectives
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.handover.drawing_model import DrawingModel


class EngineSeconds(NamedTuple):
    """Seconds that rounds of drawing took so far, and those of handing weights over to another layout, which are not among them."""

    draw: float
    handover: float

    def since(self, before: EngineSeconds) -> EngineSeconds:
        return EngineSeconds(self.draw - before.draw, self.handover - before.handover)


class RolloutEngine:
    """Every rank that draws calls its methods, and gets the same completions. longest: tokens of a prompt with its answer, at most."""

    def __init__(self, run: RunConfig, model: DrawingModel, tokenizer: Tokenizer, *, longest: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        keep_cache = run.rollout.rollout_keep_engine or run.rollout.rollout_ranks > 0
        self._pauses = keep_cache or (model.stays_in_place and can_release_memory(model.device))
        self._options = EngineOptions(
            max_sequences=run.rollout.rollout_sequences,
            max_length=longest,
            releasable_cache=not keep_cache,
            copied_weights=False,
            exact=run.train.exact_rollouts,
        )
        self._engine: Engine | None = None
        self.between_steps: Callable[[], None] | None = None
        """Called by every rank before each step of the engine; weights may change in it."""
        self._in_round, self._round_s = False, 0.0

    @property
    def seconds(self) -> EngineSeconds:
        return EngineSeconds(self._round_s - self._model.handover_s, self._model.handover_s)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Opens the engine for calls of `complete`, between which the weights stay: what it computed of a prefix is used again."""
        if self._in_round:
            yield
            return
        began = perf_counter()
        self._open()
        self._in_round = True
        try:
            yield
        except BaseException:
            self.close()
            raise
        else:
            if self._pauses:
                assert self._engine is not None, "a round has an engine"
                self._engine.pause()
            else:
                self.close()
        finally:
            self._in_round = False
            self._round_s += perf_counter() - began

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Sequence[SamplingParams]]
    ) -> list[list[Completion]]:
        """Returns the completions of each prompt, one for each of its sampling parameters; inside of a `round`."""
        assert self._engine is not None, "an engine completes within a round"
        return self._engine.complete_on_all_ranks(prompts, params)

    def weights_changed(self) -> None:
        """Forgets what was computed of former weights, but for what is being drawn."""
        if self._engine is not None:
            self._engine.forget_prefixes()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.release()
            self._engine = None
        self._model.free()

    def _open(self) -> None:
        model = self._model.load()
        if model.mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine asks the driver how much is free
        if self._engine is not None and not self._resume(self._engine, model):
            self.close()
        if self._engine is None:
            self._engine = Engine(model, self._tokenizer, self._options)
            self._engine.between_steps = self.between_steps

    def _resume(self, engine: Engine, model: ParallelModel) -> bool:
        """Whether every rank has its cache again: training may have taken memory that it had not before the first step."""
        try:
            engine.resume()
            resumed = True
        except torch.OutOfMemoryError:
            resumed = False
        return bool(collectives.all_reduce(torch.tensor([int(resumed)]), model.mesh.control, op="min"))
