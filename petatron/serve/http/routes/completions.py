"""`POST /v1/completions`: also the contract of lm_eval's local-completions (echo, one new token, log-probabilities of the prompt)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from petatron.infer.completion import Completion, TokenEvent
from petatron.serve.generation import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_body
from petatron.serve.http.openai_requests import CompletionRequest
from petatron.serve.http.run_generations import TokenStream, answer_of, complete
from petatron.serve.http.sampling import EncodedPrompt, encode_prompts, new_tokens, samples, sampling_params
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.logprob_formats import completion_logprobs, prompt_logprobs
from petatron.serve.model_card import ModelCard

_DEFAULT_MAX_TOKENS = 16


async def post_completion(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, CompletionRequest)
    model = state.check_model(body.model)
    _check(body)
    limits = state.options.limits
    prompts = await encode_prompts(body.prompt, model, limits, param="prompt")
    ids = [prompt.ids for prompt in prompts]
    n = body.n or 1
    check_batch(len(prompts) * n, state)
    scored = (
        body.prompt_logprobs
        if not (body.echo and body.logprobs is not None)
        else max(body.logprobs, body.prompt_logprobs or 0)
    )
    params = sampling_params(
        body,
        model,
        limits,
        max_new_tokens=new_tokens(body.max_tokens, _DEFAULT_MAX_TOKENS, ids, model, limits),
        logprobs=body.logprobs,
        prompt_logprobs=scored,
    )
    inbox: Inbox | None = Inbox() if body.stream else None
    generations = [
        Generation(prompt, one, index=index, inbox=inbox)
        for index, (prompt, one) in enumerate(samples(ids, params, n, model))
    ]
    answer = _Answer(body, model, prompts, n)
    if inbox is not None:
        return await answer.stream(state, generations, inbox).prepare(request)
    completions = await complete(request, state, generations)
    return await answer_of(generations, lambda: answer.whole(completions))


def check_batch(sequences: int, state: ServerState) -> None:
    """Raises where a request alone needs more than the whole server has: waiting would not help."""
    if sequences > state.options.limits.max_open:
        text = f"{sequences} sequences are more than the {state.options.limits.max_open} that this server has open at once."
        raise ApiError(400, text, param="n")


def _check(body: CompletionRequest) -> None:
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of must be equal to n: answers are not ranked here.", param="best_of")
    if body.suffix:
        raise ApiError(
            400, "suffix is not supported: the model continues a text, and does not fill a gap.", param="suffix"
        )
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        text = "Log-probabilities of the prompt are not streamed. Leave out stream, or echo with logprobs."
        raise ApiError(400, text, param="stream")


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, Any]:
    new = sum(len(one.ids) for one in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in completions)},
    }


class _Answer:
    """Formats one request's answer."""

    def __init__(self, body: CompletionRequest, model: ModelCard, prompts: Sequence[EncodedPrompt], n: int) -> None:
        self._body, self._model, self._prompts, self._n = body, model, prompts, n
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._offsets: dict[Generation, int] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "choices": choices, "usage": self._usage(completions)}

    def stream(self, state: ServerState, generations: Sequence[Generation], inbox: Inbox) -> TokenStream:
        begin = [self._piece(one.index, self._echoed(one.index)) for one in generations] if self._body.echo else []
        return TokenStream(state, generations, inbox, begin=begin, text=self._piece, chunk=self._chunk, end=self._end)

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
            choice["logprobs"] = completion_logprobs(ids, entries, texts)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion.prompt_logprobs, texts)
        return choice

    def _echoed(self, index: int) -> str:
        prompt = self._prompts[index // self._n]
        return self._model.texts.decode(prompt.ids) if prompt.text is None else prompt.text

    def _chunk(self, generation: Generation, event: TokenEvent) -> dict[str, Any] | None:
        if not event.text and event.logprob is None and event.finish_reason is None:
            return None
        logprobs = None
        if event.logprob is not None:
            offset = self._offsets.setdefault(generation, len(self._echoed(generation.index)) if self._body.echo else 0)
            token = event.logprob.token
            logprobs = completion_logprobs([token], [event.logprob], self._model.texts, offset=offset)
            self._offsets[generation] = offset + len(event.text)
        return self._piece(generation.index, event.text, logprobs, event.finish_reason)

    def _piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}

    def _end(self, completions: list[Completion]) -> list[dict[str, Any]]:
        wanted = self._body.stream_options is not None and self._body.stream_options.include_usage
        return [{**self._head, "choices": [], "usage": self._usage(completions)}] if wanted else []

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return usage(sum(len(prompt.ids) for prompt in self._prompts), completions)
