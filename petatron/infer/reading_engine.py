"""The queue of engines whose models read a sequence and continue none: a request is a sequence of ids, and its answer comes of one pass.

They take requests and give events as `infer/engine.py` does. A step reads some sequences at once, in their order, on all ranks; only what
was asked is communicated, from rank 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from petatron.config.required_settings import known_vocab_size
from petatron.data.tokenizer import Tokenizer
from petatron.infer.check_request import check_request
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent
from petatron.infer.prompt_images import PromptImages, check_prompt_images
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.json_collectives import broadcast_json
from petatron.parallel.forward_sequences import max_inputs
from petatron.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class _Sequence:
    request: int
    ids: list[int]
    asked: Any


class ReadingEngine(ABC):
    """Answers any number of requests. Not thread-safe: one thread drives it, at rank 0; the other ranks `follow`."""

    source_length: int | None = None

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer | None, options: EngineOptions | None, *, reads_only: str
    ) -> None:
        self.options, self.tokenizer, self.reads_only = options or EngineOptions(), tokenizer, reads_only
        self.vocab_size = known_vocab_size(model.spec.config)
        longest = max_inputs(model) + 1  # of prompt and answer together: an answer would have its last token there
        self.max_length = min(self.options.max_length or longest, longest)
        self.num_ranks = model.mesh.world.size
        self._model = model
        self._waiting: dict[int, _Sequence] = {}
        self._ended: dict[int, Completion] = {}
        self._cancelled: list[int] = []
        self._next_request = self._num_tokens = 0
        self._closed = False

    @abstractmethod
    def _asked(self, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
        """Returns what a request asks of its ids, as JSON; `DataError` if the model cannot answer it."""

    @abstractmethod
    def _read(self, sequences: Sequence[tuple[list[int], Any]]) -> list[dict[str, Any]]:
        """Returns the fields of `Completion` that answer each sequence with what is asked of it; on all ranks."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._cancelled)

    @property
    def stats(self) -> EngineStats:
        read = self._num_tokens
        return EngineStats(len(self._waiting), 0, 0, 0, read, 0, 0, 0, computed_prompt_tokens=read)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        images: PromptImages | None = None,
        compiled: bool = True,
    ) -> int:
        """Takes a sequence at rank 0 and returns its number; `DataError` if the model cannot read it, or continues none."""
        check_request(prompt_ids, params, self)
        check_prompt_images(prompt_ids, images, self._model.spec.config)
        asked = self._asked(prompt_ids, params)
        request, self._next_request = self._next_request, self._next_request + 1
        self._waiting[request] = _Sequence(request, list(prompt_ids), asked)
        return request

    def cancel(self, request: int) -> None:
        """Ends a request with the next step; nothing happens if it has ended."""
        if self._waiting.pop(request, None) is not None:
            self._cancelled.append(request)

    def step(self) -> list[TokenEvent]:
        """Reads the sequences that are next; returns that they ended."""
        cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self._ended[request] = Completion([], finish_reason="cancelled")
        taken = self._next_sequences()
        content = broadcast_json([[sequence.ids, sequence.asked] for sequence in taken], self._model.mesh.control)
        for sequence, answer in zip(taken, self._read(content), strict=True):
            self._ended[sequence.request] = Completion(sequence.ids, finish_reason="length", **answer)
            self._num_tokens += len(sequence.ids)
        read = (TokenEvent(sequence.request, None, finish_reason="length") for sequence in taken)
        return [*(TokenEvent(request, None, finish_reason="cancelled") for request in cancelled), *read]

    def take(self, request: int) -> Completion:
        """Returns the answer of a request that has ended, and forgets it."""
        return self._ended.pop(request)

    def follow(self) -> None:
        """Takes part in the steps of rank 0 until it closes its engine."""
        while True:
            content = broadcast_json(None, self._model.mesh.control)
            if content is None:
                return
            self._read(content)

    def close(self) -> None:
        """Ends the engines of all ranks; at rank 0."""
        if not self._closed:
            self._closed = True
            broadcast_json(None, self._model.mesh.control)

    def _next_sequences(self) -> list[_Sequence]:
        """Takes as many sequences as a step may have tokens, and one in any case."""
        waiting = list(self._waiting.values())[: self.options.max_sequences]
        totals = accumulate(len(sequence.ids) for sequence in waiting)
        count = sum(total <= self.options.max_step_tokens for total in totals)
        taken = waiting[: max(count, 1)]
        for sequence in taken:
            del self._waiting[sequence.request]
        return taken
