"""The engine of models that read texts and continue none, as encoders do: a request is a text, and its answer one vector.

It takes requests and gives events as `infer/engine.py` does. A step reads some texts at once, in their order, on all ranks; only the texts
are communicated, from rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from petatron.config.required_settings import known_vocab_size
from petatron.data.tokenizer import Tokenizer
from petatron.infer.check_request import check_request
from petatron.infer.encoder.pooled_states import pooled_states
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent
from petatron.infer.sampling_params import PoolingName, SamplingParams
from petatron.mesh.json_collectives import broadcast_json
from petatron.parallel.forward_sequences import max_inputs
from petatron.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class _Text:
    request: int
    ids: list[int]
    pooling: PoolingName


class EncoderEngine:
    """Embeds any number of texts. Not thread-safe: one thread drives it, at rank 0; the other ranks `follow`.

    >>> import petatron
    >>> flags = ["--model-type", "bert", "--mock-data", "--lr", "1e-3", "--train-iters", "2"]
    >>> run = petatron.load("tiny-llama", flags)
    >>> engine = EncoderEngine(petatron.build_model(run, petatron.launch(run)), None, None, reads_only="It is an encoder.")
    >>> request = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=0, pooling="first"))
    >>> [event.finish_reason for event in engine.step()], len(engine.take(request).pooled) == run.config.model.hidden_size
    (['length'], True)
    """

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer | None, options: EngineOptions | None, *, reads_only: str
    ) -> None:
        self.options, self.tokenizer, self.reads_only = options or EngineOptions(), tokenizer, reads_only
        self.vocab_size = known_vocab_size(model.spec.config)
        longest = max_inputs(model) + 1  # of prompt and answer together: an answer would have its last token there
        self.max_length = min(self.options.max_length or longest, longest)
        self.num_ranks = model.mesh.world.size
        self._model = model
        self._waiting: dict[int, _Text] = {}
        self._ended: dict[int, Completion] = {}
        self._cancelled: list[int] = []
        self._next_request = self._num_tokens = 0
        self._closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._cancelled)

    @property
    def stats(self) -> EngineStats:
        read = self._num_tokens
        return EngineStats(len(self._waiting), 0, 0, 0, read, 0, 0, 0, computed_prompt_tokens=read)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, compiled: bool = True) -> int:
        """Takes a text at rank 0 and returns its number; `DataError` if the model cannot read it, or continues none."""
        check_request(prompt_ids, params, self)
        assert params.pooling is not None, "check_request lets only those pass that are pooled"
        request, self._next_request = self._next_request, self._next_request + 1
        self._waiting[request] = _Text(request, list(prompt_ids), params.pooling)
        return request

    def cancel(self, request: int) -> None:
        """Ends a request with the next step; nothing happens if it has ended."""
        if self._waiting.pop(request, None) is not None:
            self._cancelled.append(request)

    def step(self) -> list[TokenEvent]:
        """Reads the texts that are next; returns that they ended."""
        cancelled, self._cancelled = self._cancelled, []
        for request in cancelled:
            self._ended[request] = Completion([], finish_reason="cancelled")
        texts = self._next_texts()
        content = broadcast_json([[text.ids, text.pooling] for text in texts], self._model.mesh.control)
        for text, vector in zip(texts, self._read(content), strict=True):
            self._ended[text.request] = Completion(text.ids, pooled=vector, finish_reason="length")
            self._num_tokens += len(text.ids)
        read = (TokenEvent(text.request, None, finish_reason="length") for text in texts)
        return [*(TokenEvent(request, None, finish_reason="cancelled") for request in cancelled), *read]

    def take(self, request: int) -> Completion:
        """Returns the answer of a request that has ended, and forgets it."""
        return self._ended.pop(request)

    def capture_graphs(self, progress: object = None) -> None:
        """There are none: texts of all lengths are read."""

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

    def _read(self, texts: Sequence[tuple[list[int], PoolingName]]) -> list[list[float]]:
        """Returns the vector of each text; on all ranks."""
        vectors: list[list[float]] = [[]] * len(texts)
        for pooling in dict.fromkeys(kind for _, kind in texts):
            places = [place for place, (_, kind) in enumerate(texts) if kind == pooling]
            pooled = pooled_states(self._model, [texts[place][0] for place in places], pooling=pooling)
            for place, vector in zip(places, pooled, strict=True):
                vectors[place] = vector
        return vectors

    def _next_texts(self) -> list[_Text]:
        """Takes as many texts as a step may have tokens, and one in any case."""
        waiting = list(self._waiting.values())[: self.options.max_sequences]
        totals = accumulate(len(text.ids) for text in waiting)
        count = sum(total <= self.options.max_step_tokens for total in totals)
        taken = waiting[: max(count, 1)]
        for text in taken:
            del self._waiting[text.request]
        return taken
