"""An engine without a model: the next token is a fixed random function of the last three, so that every answer can be worked out."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from petatron.base.errors import DataError
from petatron.data.tokenizer import ByteTokenizer, Tokenizer
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent, TokenLogprob
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams


@dataclass
class _Request:
    params: SamplingParams
    completion: Completion
    ids: list[int]
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    sent: int = 0
    text: str = ""


class FakeEngine:
    """Continuous batching of `max_sequences`, one token each a step."""

    reads_only = None

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        max_length: int = 200,
        max_sequences: int = 8,
        step_s: float = 0.0,
        salt: int = 0,
    ) -> None:
        self.tokenizer: Tokenizer | None = tokenizer or ByteTokenizer()
        self.max_length, self.vocab_size, self.max_sequences = max_length, self.tokenizer.vocab_size, max_sequences
        self.step_s, self.salt = step_s, salt
        self.requests: dict[int, _Request] = {}
        self.finished: dict[int, Completion] = {}
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.fail_with: Exception | None = None
        self.ended_with: Exception | None = None
        self.closed = False
        self._next = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def stats(self) -> EngineStats:
        running = min(len(self.requests), self.max_sequences)
        return EngineStats(
            waiting=len(self.requests) - running,
            running=running,
            pages_used=running,
            pages_total=64,
            prompt_tokens=self._num_prompt_tokens,
            cached_prompt_tokens=0,
            generated_tokens=self._num_generated_tokens,
            preemptions=0,
        )

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None) -> int:
        if len(prompt_ids) + max(params.max_new_tokens, 1) > self.max_length:
            raise DataError("The request is too long.")
        if params.constraint is not None and params.constraint.grammar == "unreadable":
            raise DataError("The grammar cannot be read.")
        self.seen.append((list(prompt_ids), params))
        self._next += 1
        self.requests[self._next] = _Request(params, Completion(list(prompt_ids)), list(prompt_ids))
        self._num_prompt_tokens += len(prompt_ids)
        return self._next

    def cancel(self, request: int) -> None:
        self.requests.pop(request, None)

    def take(self, request: int) -> Completion:
        return self.finished.pop(request)

    def greedy(self, prompt: str | Sequence[int], count: int) -> str:
        """What it answers at temperature 0."""
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        for _ in range(count):
            ids.append(int(self.logprobs(ids).argmax()))
        return bytes(ids[-count:]).decode()

    def check_alive(self) -> None:
        if self.ended_with is not None:
            raise self.ended_with

    def wake(self) -> None:
        """Its steps wait for nothing."""

    def close(self) -> None:
        self.closed = True

    def step(self) -> list[TokenEvent]:
        if self.fail_with is not None:
            raise self.fail_with
        if self.step_s:
            time.sleep(self.step_s)
        batch = list(self.requests.items())[: self.max_sequences]
        return [self._advance(number, request) for number, request in batch]

    def logprobs(self, context: Sequence[int]) -> np.ndarray:
        seed = [self.salt, *(list(context)[-3:])]
        logits = np.random.default_rng(seed).normal(size=self.vocab_size) * 3
        logits[ord("a") : ord("z") + 1] += 12
        return logits - math.log(np.exp(logits).sum())

    def _entry(self, context: Sequence[int], token: int, count: int) -> TokenLogprob:
        values = self.logprobs(context)
        best = np.argsort(-values)[:count]
        return TokenLogprob(token, float(values[token]), tuple((int(one), float(values[one])) for one in best))

    def _advance(self, number: int, request: _Request) -> TokenEvent:
        params, done = request.params, request.completion
        if params.prompt_logprobs is not None and not done.prompt_logprobs:
            prompt = done.prompt_ids
            done.prompt_logprobs = [
                self._entry(prompt[:place], prompt[place], params.prompt_logprobs) for place in range(1, len(prompt))
            ]
        if params.pooling is not None:
            done.pooled = [float(sum(done.prompt_ids)), 1.0, -2.0]
            return self._finish(number, request, None, None, "stop")
        if not params.max_new_tokens:
            return self._finish(number, request, None, None, "length")
        token = self._draw(request)
        entry = None if params.logprobs is None else self._entry(request.ids, token, params.logprobs)
        request.ids.append(token)
        done.ids.append(token)
        self._num_generated_tokens += 1
        if entry is not None:
            done.logprobs.append(entry)
        if token in params.stop_ids:
            done.stop = token
            return self._finish(number, request, token, entry, "stop")
        request.text += request.decoder.decode(bytes([token])) if token < 256 else "\ufffd"
        for stop in params.stop_strings:
            if stop in request.text:
                request.text, done.stop = request.text[: request.text.index(stop)], stop
                return self._finish(number, request, token, entry, "stop")
        if len(done.ids) == params.max_new_tokens:
            return self._finish(number, request, token, entry, "length")
        hold = max((len(stop) - 1 for stop in params.stop_strings), default=0)
        return TokenEvent(number, token, self._new_text(request, hold), entry)

    def _draw(self, request: _Request) -> int:
        params, values = request.params, self.logprobs(request.ids).copy()
        for token, bias in params.logit_bias.items():
            values[token] += bias
        if len(request.completion.ids) < params.min_new_tokens:
            values[list(params.stop_ids)] = -np.inf
        if params.greedy:
            return int(values.argmax())
        noise = np.random.default_rng([params.seed, params.sample, len(request.completion.ids)]).gumbel(
            size=len(values)
        )
        return int((values / params.temperature + noise).argmax())

    def _new_text(self, request: _Request, hold: int) -> str:
        until = max(len(request.text) - hold, request.sent)
        new, request.sent = request.text[request.sent : until], until
        return new

    def _finish(self, number, request, token, entry, reason) -> TokenEvent:
        done = request.completion
        done.text, done.finish_reason = request.text, reason
        del self.requests[number]
        self.finished[number] = done
        return TokenEvent(number, token, self._new_text(request, 0), entry, reason)
