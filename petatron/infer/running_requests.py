"""The requests of an engine from start to answer: new tokens are added to their sequences, which end at a stop, a length or a cancel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from petatron.base.errors import PetatronError, RequestError
from petatron.base.log import get_logger
from petatron.config.schema.model import ModelConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.constrained_decoding import ConstraintCompiler
from petatron.infer.engine_outputs import Completion, FinishReason, TokenEvent, TokenLogprob
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.scheduler import Scheduler
from petatron.infer.sequence import Sequence as RunningSequence
from petatron.infer.step.step_result import NO_TOKEN, SequenceResult
from petatron.infer.text_stream import TextStream

_log = get_logger(__name__)


class RunningRequests:
    """Sequences by request number, in the schedulers of the replicas that serve them, and what is counted of them."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        constraints: ConstraintCompiler,
        *,
        tokenizer: Tokenizer | None,
        max_length: int,
        decoder_start: int | None = None,
        image_config: ModelConfig | None = None,
    ) -> None:
        """decoder_start: the token before the answers of an encoder-decoder; None: prompts are continued. image_config: of a model that
        reads images."""
        self._decoder_start, self._image_config = decoder_start, image_config
        self._schedulers, self._constraints = schedulers, constraints
        self._tokenizer, self._max_length = tokenizer, max_length
        self.sequences: dict[int, RunningSequence] = {}
        self._failures: dict[int, PetatronError] = {}
        self.counts = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "generated_tokens": 0}
        self.counts |= {"drafted_tokens": 0, "accepted_tokens": 0, "speculative_decodes": 0}

    def take(self, request: int) -> Completion:
        """Returns the answer of a request that has ended, and forgets it; raises the error that ended it."""
        if request in self._failures:
            self.sequences.pop(request, None)
            raise self._failures.pop(request)
        sequence = self.sequences.pop(request)
        assert sequence.completion.finish_reason is not None, f"request {request} has not ended"
        return sequence.completion

    def start(
        self, request: int, prompt: Sequence[int], params: SamplingParams, images: PromptImages | None = None
    ) -> None:
        constraint, start = params.constraint, self._decoder_start
        source, tokens = ([], list(prompt)) if start is None else (list(prompt), [start])
        sequence = RunningSequence(
            request,
            list(tokens),
            params,
            max_length=min(self._max_length, len(tokens) + params.max_new_tokens),
            stream=TextStream(self._tokenizer if params.wants_text or params.stop_strings else None, params),
            completion=Completion(tokens),
            source=source,
            constraint=None if constraint is None else self._constraints.start(constraint, stop_ids=params.stop_ids),
        )
        if images is not None and self._image_config is not None:
            sequence.images = images
            sequence.coordinates = images.coordinates(prompt, self._image_config)
        if sequence.coordinates is not None:
            sequence.position_offset = int(sequence.coordinates.max()) + 1 - len(prompt)
        self.sequences[request] = sequence
        self.counts["prompt_tokens"] += len(prompt)
        self._scheduler(request).add(sequence)

    def forget(self, request: int) -> None:
        """`take`, for ranks that nobody asks."""
        self.sequences.pop(request, None)
        self._failures.pop(request, None)

    def fail(self, request: int, error: Exception) -> TokenEvent:
        """Ends a request whose own handling raised: the others go on. Ranks handle requests alike, so it fails on all of them."""
        if not isinstance(error, PetatronError):
            _log.error("request %d failed", request, exc_info=error)
            error = RequestError("The engine failed at this request, and goes on with others. Its log has the cause.")
        self._failures[request] = error
        sequence = self.sequences.get(request)
        if sequence is not None:
            sequence.completion.finish_reason = "failed"
            self._scheduler(request).remove(sequence)
        return TokenEvent(request, None, finish_reason="failed")

    def cancel(self, request: int) -> list[TokenEvent]:
        """Ends a request; no event if it has ended."""
        sequence = self.sequences.get(request)
        if sequence is None or sequence.completion.finish_reason is not None:
            return []
        self._scheduler(request).remove(sequence)
        return [self._finish(sequence, TokenEvent(request, None, finish_reason="cancelled"))]

    def add_result(self, scheduler: Scheduler, result: SequenceResult, *, speculative: bool) -> list[TokenEvent]:
        """Adds what a step found of a sequence; an event if it has a new token or ends."""
        sequence = result.work.sequence
        sequence.completion.prompt_logprobs += result.prompt_logprobs
        if result.pooled is not None:
            sequence.add_pooled(result.pooled)
        if not result.work.reaches_end:
            return []
        if not result.tokens or result.tokens[0] == NO_TOKEN:
            scheduler.remove(sequence)
            text = sequence.stream.finish()
            return [self._finish(sequence, TokenEvent(sequence.request, None, text, finish_reason="length"))]
        events: list[TokenEvent] = []
        for token, logprob in zip(result.tokens, result.logprobs or repeat(None)):
            events.append(self.add_token(scheduler, sequence, token, logprob))
            if events[-1].finish_reason is not None:
                break  # what was accepted after the end is not in the answer
        if speculative and result.work.decodes:
            self.counts["drafted_tokens"] += len(result.work.drafts)
            self.counts["accepted_tokens"] += len(events) - 1
            self.counts["speculative_decodes"] += 1
        return events

    def add_token(
        self, scheduler: Scheduler, sequence: RunningSequence, token: int, logprob: TokenLogprob | None
    ) -> TokenEvent:
        sequence.tokens.append(token)
        sequence.completion.ids.append(token)
        self.counts["generated_tokens"] += 1
        if logprob is not None:
            sequence.completion.logprobs.append(logprob)
        reason, text = _find_end(sequence, token)
        event = TokenEvent(sequence.request, token, text, logprob, reason)
        if reason is None:
            return event
        scheduler.remove(sequence)
        return self._finish(sequence, event)

    def _scheduler(self, request: int) -> Scheduler:
        return self._schedulers[request % len(self._schedulers)]

    def _finish(self, sequence: RunningSequence, event: TokenEvent) -> TokenEvent:
        sequence.completion.text = sequence.stream.text
        sequence.completion.finish_reason = event.finish_reason
        self.counts["cached_prompt_tokens"] += sequence.completion.cached_tokens
        return event


def _find_end(sequence: RunningSequence, token: int) -> tuple[FinishReason | None, str]:
    """Returns whether a sequence ends with a token, and the text that became certain."""
    stream, completion, constraint = sequence.stream, sequence.completion, sequence.constraint
    if token in sequence.params.stop_ids or (constraint is not None and token in constraint.end_ids):
        completion.stop = token
        return "stop", (stream.add(token) if sequence.params.keep_stop else "") + stream.finish()
    text = stream.add(token)
    if stream.stop is not None:
        completion.stop = stream.stop
        return "stop", text
    if constraint is not None:
        constraint.advance(token)
        if constraint.is_over:
            return "stop" if constraint.is_matched else "length", text + stream.finish()
    if len(sequence.tokens) >= sequence.max_length:
        return "length", text + stream.finish()
    return None, text
