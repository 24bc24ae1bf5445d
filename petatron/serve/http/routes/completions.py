"""`POST /v1/completions`: also the contract of lm_eval's local-completions (echo, one new token, log-probabilities of the prompt)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.beam_search import beam_params, check_beams, complete_by_beams
from petatron.serve.http.json_body import read_request
from petatron.serve.http.openai_requests import CompletionRequest, SamplingFields
from petatron.serve.http.request_to_engine import (
    EncodedPrompt,
    check_prompt,
    encode_prompts,
    encode_text,
    new_tokens,
    samples,
    sampling_params,
)
from petatron.serve.http.run_generations import TokenStream, answer_of, complete
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.http.token_usage import RunningUsage, usage
from petatron.serve.logprob_formats import completion_logprobs, prompt_logprobs
from petatron.serve.serve_options import ServeLimits
from petatron.serve.served_model_properties import ModelCard

_DEFAULT_MAX_TOKENS = 16


async def post_completion(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, CompletionRequest)
    model = state.check_model(body.model)
    check_samples(body)
    if body.stream and body.echo and body.logprobs is not None:
        text = "Log-probabilities of the prompt are not streamed. Leave out stream, or echo with logprobs."
        raise ApiError(400, text, param="stream")
    limits, n = state.options.limits, body.n or 1
    prompts = await _encode(body, model, limits)
    ids = [prompt.ids for prompt in prompts]
    check_batch(len(prompts) * n, state)
    reports_echo = body.echo and body.logprobs is not None
    scored = max(body.logprobs or 0, body.prompt_logprobs or 0) if reports_echo else body.prompt_logprobs
    params = sampling_params(
        body,
        model,
        limits,
        max_new_tokens=(most := new_tokens(body.max_tokens, _DEFAULT_MAX_TOKENS, ids, model, limits)),
        asked_tokens=most,
        logprobs=body.logprobs,
        prompt_logprobs=scored,
    )
    check_beams(body, constrained=params.constraint is not None)
    return await answer_request(request, body, _Answer(body, model, prompts, n), ids, params)


class SampledAnswer(Protocol):
    """Formats the answer to a request."""

    def as_json(self, completions: Sequence[Completion]) -> dict[str, Any]: ...
    def stream(self, state: ServerState, generations: Sequence[Generation], inbox: Inbox) -> TokenStream: ...


async def answer_request(
    request: Request,
    body: SamplingFields,
    answer: SampledAnswer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    images: PromptImages | None = None,
) -> Response:
    """Runs what a completion or a chat asks for: n samples of each prompt, at once or as a stream, or a beam search.

    images: those of a single prompt.
    """
    state = state_of(request)
    if body.use_beam_search:
        beams = beam_params(body, params)
        return JSONResponse(answer.as_json(await complete_by_beams(request, state, prompts, beams, params)))
    inbox = Inbox() if body.stream else None
    generations = [
        Generation(prompt, sampling, index=index, inbox=inbox, images=images)
        for index, (prompt, sampling) in enumerate(samples(prompts, params, body.n or 1, state.model))
    ]
    if inbox is not None:
        return await answer.stream(state, generations, inbox).prepare(request)
    completions = await complete(request, state, generations)
    return await answer_of(generations, lambda: answer.as_json(completions))


async def _encode(body: CompletionRequest, model: ModelCard, limits: ServeLimits) -> list[EncodedPrompt]:
    """Returns the prompts; those of a request with a suffix are texts around a gap."""
    if not body.suffix:
        return await encode_prompts(body.prompt, body, model, limits, param="prompt")
    if model.fill_in_middle is None:
        text = "suffix needs a model that was trained to fill a gap: this one's tokenizer has no tokens for it."
        raise ApiError(400, text, param="suffix")
    if body.echo or body.truncate_prompt_tokens is not None:
        raise ApiError(400, "suffix goes neither with echo nor with truncate_prompt_tokens.", param="suffix")
    before = await encode_prompts(body.prompt, body, model, limits, param="prompt", prefix=())
    after = await encode_text(body.suffix, model)
    prefix = () if body.add_special_tokens is False else model.prefix_ids
    prompts = [
        EncodedPrompt([*prefix, *model.fill_in_middle.prompt(prompt.ids, after)], prompt.text) for prompt in before
    ]
    for prompt in prompts:
        check_prompt(prompt.ids, model, limits, param="prompt")
    return prompts


def check_batch(sequences: int, state: ServerState) -> None:
    """Raises where a request alone needs more than the whole server has: waiting would not help."""
    if sequences > state.options.limits.max_open:
        text = f"{sequences} sequences are more than the {state.options.limits.max_open} that this server has open at once."
        raise ApiError(400, text, param="n")


def check_samples(body: SamplingFields) -> None:
    """What completions and chats refuse alike."""
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of must be equal to n: answers are not ranked here.", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream true.", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        text = "Log-probabilities of the prompt are not streamed. Leave out stream, or prompt_logprobs."
        raise ApiError(400, text, param="stream")


def continuous_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


class _Answer:
    """Formats one request's answer."""

    def __init__(self, body: CompletionRequest, model: ModelCard, prompts: Sequence[EncodedPrompt], n: int) -> None:
        self._body, self._model, self._prompts, self._n = body, model, prompts, n
        self._head = {
            "id": f"cmpl-{body.request_id or secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._num_chars: dict[Generation, int] = {}
        self._begun: set[Generation] = set()
        self._running = RunningUsage() if continuous_usage(body) else None

    def as_json(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "choices": choices, "usage": self._usage(completions)}

    def stream(self, state: ServerState, generations: Sequence[Generation], inbox: Inbox) -> TokenStream:
        begin = [self._counted(generation.index, None) for generation in generations] if self._body.echo else []
        text = None if self._body.return_token_ids or self._running is not None else self._piece
        return TokenStream(
            state, generations, inbox, begin=begin, text=text, chunk=self._chunk, end=self._end, joins=text is not None
        )

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        body, texts = self._body, self._model.texts
        text = (self._echoed(index) if body.echo else "") + completion.text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": completion.finish_reason}
        choice["stop_reason"] = completion.stop
        if body.logprobs is not None:
            ids, entries = list(completion.ids), list(completion.logprobs)
            if body.echo:
                ids = [*completion.prompt_ids, *ids]
                entries = [None, *completion.prompt_logprobs, *entries]
            as_ids = bool(body.return_tokens_as_token_ids)
            choice["logprobs"] = completion_logprobs(ids, entries, texts, as_ids=as_ids)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion.prompt_logprobs, texts)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(completion.prompt_ids), "token_ids": list(completion.ids)}
        return choice

    def _echoed(self, index: int) -> str:
        prompt = self._prompts[index // self._n]
        return self._model.texts.decode(prompt.ids) if prompt.text is None else prompt.text

    def _chunk(self, generation: Generation, event: TokenEvent) -> dict[str, Any] | None:
        ids = self._body.return_token_ids
        silent = not event.text and event.logprob is None and event.finish_reason is None and not ids
        if silent and self._running is None:
            return None
        piece = self._counted(generation.index, event)
        choice = piece["choices"][0]
        if event.logprob is not None:
            # Its text may be sent later, with that of other tokens.
            entry, texts, as_ids = event.logprob, self._model.texts, bool(self._body.return_tokens_as_token_ids)
            start, self._num_chars[generation] = texts.place(entry.token, self._num_chars.get(generation, 0))
            logprobs = completion_logprobs([entry.token], [entry], texts, as_ids=as_ids)
            choice["logprobs"] = {**logprobs, "text_offset": [start]}
        if event.finish_reason is not None:
            choice["stop_reason"] = generation.stop
        if ids:
            choice["token_ids"] = [] if event.token is None else [event.token]
            if generation not in self._begun:
                self._begun.add(generation)
                choice["prompt_token_ids"] = list(generation.prompt_ids)
        return piece

    def _counted(self, index: int, event: TokenEvent | None) -> dict[str, Any]:
        """Returns the piece of an event, with the counts so far where they are asked for; None: the prompt comes before the answer."""
        text, reason = (self._echoed(index), None) if event is None else (event.text, event.finish_reason)
        piece = self._piece(index, text, reason)
        if self._running is not None:
            piece["usage"] = self._running.after(len(self._prompts[index // self._n].ids), index, event)
        return piece

    def _piece(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}

    def _end(self, completions: list[Completion]) -> list[dict[str, Any]]:
        wanted = self._body.stream_options is not None and self._body.stream_options.include_usage
        return [{**self._head, "choices": [], "usage": self._usage(completions)}] if wanted else []

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return usage(sum(len(prompt.ids) for prompt in self._prompts), completions, n=self._n)
