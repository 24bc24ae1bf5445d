"""A beam search over HTTP: its steps are requests of one token, between and during which the client may leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request

from petatron.infer.beam.beam_search import BeamAnswer, BeamParams, BeamSearch
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import SamplingFields
from petatron.serve.http.run_generations import complete
from petatron.serve.http.server_state import ServerState

_SAMPLED = (
    *("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "min_tokens", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "stream", "echo"),
    *("return_tokens_as_token_ids", "cache_salt", "tools", "functions"),
)
"""Fields that have no effect on a beam search."""


def check_beams(body: SamplingFields, *, constrained: bool) -> None:
    """Raises `ApiError` where fields of beam search and of sampling do not agree."""
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise ApiError(400, f"{name} is one of beam search: send use_beam_search true.", param=name)
        return
    names = [name for name in _SAMPLED if getattr(body, name, None) not in (None, False, 0, [], {})]
    names += ["response_format"] if constrained else []
    if body.temperature not in (None, 0, 1):
        names.append("temperature")
    if names:
        text = f"{', '.join(names)}: has no effect on a beam search. Leave it out, or use_beam_search."
        raise ApiError(400, text, param=names[0])


def beam_params(body: SamplingFields, params: SamplingParams) -> BeamParams:
    """The width is n, as in vLLM."""
    if not params.max_new_tokens:
        raise ApiError(400, "A beam search generates one token or more.", param="max_tokens")
    return BeamParams(
        width=body.n or 1,
        max_new_tokens=params.max_new_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
        stop_ids=params.stop_ids,
    )


async def search_beams(
    request: Request, state: ServerState, prompt_ids: Sequence[int], params: BeamParams
) -> list[BeamAnswer]:
    """Returns the answers, the best first."""
    search = BeamSearch(prompt_ids, params, state.model.vocab_size)
    while not search.is_over:
        generations = [
            Generation(ids, sampling, index=index) for index, (ids, sampling) in enumerate(search.requests())
        ]
        search.advance([completion.logprobs[0] for completion in await complete(request, state, generations)])
    return search.answers


async def complete_by_beams(
    request: Request, state: ServerState, prompts: Sequence[Sequence[int]], params: BeamParams, asked: SamplingParams
) -> list[Completion]:
    """Returns the answers to each prompt as completions, the best first. asked: what of them is text."""
    completions = []
    for prompt in prompts:
        room = replace(params, max_new_tokens=min(params.max_new_tokens, state.model.max_length - len(prompt)))
        for answer in await search_beams(request, state, prompt, room):
            ended = answer.ids[-1] in params.stop_ids
            ids = answer.ids if asked.keep_stop else answer.text_ids(params.stop_ids)
            ids = [token for token in ids if token not in asked.hidden_ids]
            completion = Completion(list(prompt), list(answer.ids), state.model.texts.decode(ids))
            completion.finish_reason, completion.stop = ("stop", answer.ids[-1]) if ended else ("length", None)
            completions.append(completion)
    return completions
