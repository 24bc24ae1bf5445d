"""Megatron's `PUT /api`: the fields and the answer of its text generation server."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.beam.beam_search import BeamParams
from petatron.infer.completion import Completion
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.serve.generation import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.beams import search_beams
from petatron.serve.http.json_body import read_body
from petatron.serve.http.megatron_requests import DEFAULT_TOKENS, MegatronRequest
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.run_generations import complete
from petatron.serve.http.sampling import (
    check_ids,
    check_prompt,
    check_text,
    encode_text,
    new_tokens,
    samples,
    stable_temperature,
)
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.logprob_formats import finite, own_logprob
from petatron.serve.model_card import ModelCard

_NO_BREAK = r"(?:[^:]|:+[^:\n])*:*"
_NO_BREAK_AFTER_COLON = rf":*(?:[^:\n]{_NO_BREAK})?"


async def put_api(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, MegatronRequest, any_type=True)
    model = state.model
    _check(body, state)
    for text in body.prompts:
        check_text(text, model, state.options.limits, param="prompts")
    model.needed_tokenizer()
    before = [model.bos_id] if body.add_BOS and model.bos_id is not None else []
    prompts = [[*before, *(await encode_text(text, model) if text else ())] for text in body.prompts]
    for ids in prompts:
        check_prompt(ids, model, state.options.limits, param="prompts")
    params = _params(body, prompts, state)
    if body.beam_width is not None:
        return JSONResponse(await _search_beams(request, body, state, prompts[0], params))
    generations = []
    for index, ((ids, sampling), text) in enumerate(zip(samples(prompts, params, 1, model), body.prompts)):
        generations.append(Generation(ids, _with_constraint(sampling, body, text), index=index))
    completions = await complete(request, state, generations)
    return JSONResponse(_answer(body, model, completions))


def _check(body: MegatronRequest, state: ServerState) -> None:
    limits = state.options.limits
    if len(body.prompts) > limits.max_batch:
        text = f"{len(body.prompts)} prompts are more than the {limits.max_batch} that one request may have."
        raise ApiError(400, text, param="prompts")
    check_batch(max(len(body.prompts), body.beam_width or 1), state)
    if (body.beam_width or 1) > limits.max_n:
        text = f"beam_width {body.beam_width} is more than the {limits.max_n} that this server allows."
        raise ApiError(400, text, param="beam_width")
    check_ids([] if body.stop_token is None else [body.stop_token], state.model, param="stop_token")
    if body.add_BOS and state.model.bos_id is None:
        raise ApiError(400, "The model's tokenizer has no token that begins a text.", param="add_BOS")


def _params(body: MegatronRequest, prompts: list[list[int]], state: ServerState) -> SamplingParams:
    model = state.model
    asked = body.tokens_to_generate if "tokens_to_generate" in body.model_fields_set else None
    stops = [text for wanted, text in ((body.stop_on_double_eol, "\n\n"), (body.stop_on_eol, "\n")) if wanted]
    return SamplingParams(
        max_new_tokens=new_tokens(
            asked, DEFAULT_TOKENS, prompts, model, state.options.limits, param="tokens_to_generate"
        ),
        temperature=0.0 if body.top_k == 1 else stable_temperature(body.temperature),
        top_k=body.top_k if body.top_k > 1 else None,
        top_p=body.top_p or None,
        top_p_decay=body.top_p_decay or 1.0,
        top_p_bound=body.top_p_bound,
        seed=secrets.randbits(63) if body.random_seed is None else body.random_seed,
        stop_ids=model.stop_ids if body.stop_token is None else (body.stop_token,),
        stop_strings=tuple(stops),
        logprobs=0 if body.logprobs else None,
        prompt_logprobs=0 if body.logprobs else None,
    )


def _with_constraint(params: SamplingParams, body: MegatronRequest, prompt: str) -> SamplingParams:
    """No line break after a colon is a regular language; whether the first character follows one depends on the prompt."""
    if not body.prevent_newline_after_colon or not params.max_new_tokens:
        return params
    grammar = _NO_BREAK_AFTER_COLON if prompt.endswith(":") else _NO_BREAK
    return replace(params, constraint=Constraint(kind="regex", grammar=grammar))


async def _search_beams(
    request: Request, body: MegatronRequest, state: ServerState, prompt_ids: list[int], params: SamplingParams
) -> dict[str, Any]:
    assert body.beam_width is not None
    beams = BeamParams(width=body.beam_width, max_new_tokens=params.max_new_tokens, stop_ids=params.stop_ids)
    if body.length_penalty is not None:
        beams = replace(beams, length_penalty=body.length_penalty)
    answers = await search_beams(request, state, prompt_ids, beams)
    texts = state.model.texts
    tokens = [[*prompt_ids, *answer.ids] for answer in answers]
    return {
        "text": [body.prompts[0] + texts.decode(answer.text_ids(beams.stop_ids)) for answer in answers],
        "segments": [[texts.text_of(token) for token in ids] for ids in tokens],
        "tokens": tokens,
        "scores": [finite(answer.score) for answer in answers],
    }


def _answer(body: MegatronRequest, model: ModelCard, completions: list[Completion]) -> dict[str, Any]:
    tokens = [[*completion.prompt_ids, *completion.ids] for completion in completions]
    answer: dict[str, Any] = {
        "text": [prompt + completion.text for prompt, completion in zip(body.prompts, completions)],
        "segments": [[model.texts.text_of(token) for token in ids] for ids in tokens],
        "tokens": tokens,
    }
    if body.logprobs:
        answer["logprobs"] = [
            [own_logprob(entry) for entry in (*completion.prompt_logprobs, *completion.logprobs)]
            for completion in completions
        ]
    return answer
