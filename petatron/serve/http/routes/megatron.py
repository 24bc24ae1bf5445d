"""Megatron's `PUT /api`: the fields and the answer of its text generation server.

Every field of the body that is accepted has an effect; others are refused, with the reason.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from petatron.infer.beam.beam_search import BeamParams
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import Constraint, SamplingParams
from petatron.serve.generation_handle import Generation
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.beam_search import search_beams
from petatron.serve.http.json_body import read_body
from petatron.serve.http.request_to_engine import (
    check_ids,
    check_prompt,
    check_text,
    encode_text,
    new_tokens,
    samples,
    stable_temperature,
)
from petatron.serve.http.routes.completions import check_batch
from petatron.serve.http.run_generations import complete
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.logprob_formats import finite, own_logprob
from petatron.serve.served_model_properties import ModelCard

_NO_BREAK = r"(?:[^:]|:+[^:\n])*:*"
_NO_BREAK_AFTER_COLON = rf":*(?:[^:\n]{_NO_BREAK})?"
MAX_PROMPTS, DEFAULT_TOKENS = 128, 64
_REFUSED = {
    "max_len": "max_len is no longer used. Use tokens_to_generate.",
    "sentences": "sentences is no longer used. Use prompts.",
}
_REFUSED_WITH_BEAMS = (
    *("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "random_seed", "logprobs"),
    *("stop_on_eol", "stop_on_double_eol", "prevent_newline_after_colon"),
)
"""Fields of sampling, which a beam search does not do."""


class MegatronRequest(BaseModel):
    """Megatron's defaults. The same names and bounds as its server, which checks most of them and uses six."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    tokens_to_generate: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    logprobs: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_bound: Annotated[float, Field(ge=0, le=1)] = 0.0
    add_BOS: bool = False
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop_token: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    beam_width: Annotated[int, Field(ge=1)] | None = None
    length_penalty: float | None = None
    no_log: bool = False
    """Nothing of a request is logged, with or without it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        for name, why in _REFUSED.items():
            if isinstance(given, dict) and given.get(name) is not None:
                raise ValueError(why)
        return {k: v for k, v in given.items() if k not in _REFUSED} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        wrong = []
        if self.tokens_to_generate == 0 and not self.logprobs:
            wrong.append("tokens_to_generate 0 asks for nothing unless logprobs is true.")
        if self.top_k and self.top_p:
            wrong.append("Use either top_k or top_p, not both.")
        if (self.top_p_decay or self.top_p_bound) and not self.top_p:
            wrong.append("top_p_decay and top_p_bound need top_p.")
        if self.top_p_bound > self.top_p:
            wrong.append("top_p_bound is more than top_p, where it starts.")
        wrong += self._wrong_beams()
        if not self.add_BOS and not all(self.prompts):
            wrong.append("An empty prompt needs add_BOS true.")
        if wrong:
            raise ValueError(" ".join(wrong))
        return self

    def _wrong_beams(self) -> list[str]:
        if self.beam_width is None:
            needless = self.length_penalty not in (None, 1)
            return ["length_penalty is one of beam search, which beam_width asks for."] * needless
        wrong = []
        if len(self.prompts) != 1:
            wrong.append("A beam search takes one prompt: send several requests.")
        if self.tokens_to_generate == 0:
            wrong.append("A beam search generates one token or more.")
        fields = type(self).model_fields
        sampled = [name for name in _REFUSED_WITH_BEAMS if getattr(self, name) != fields[name].default]
        if sampled:
            wrong.append(f"{', '.join(sampled)}: has no effect on a beam search. Leave it out, or beam_width.")
        return wrong


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
    return JSONResponse(_answer(body, model, await complete(request, state, generations)))


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
