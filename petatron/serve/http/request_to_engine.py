"""Translates a request for the engine: its prompts as ids, its sampling parameters and its constraint, within the server's limits.

A constraint may come under several names:

what               OpenAI                                 vLLM, now and before                      SGLang       llama.cpp
JSON schema        response_format type json_schema       structured_outputs.json, guided_json      json_schema  json_schema
any JSON object    response_format type json_object       .json_object, guided_json_object
regex              response_format type regex (ours)      .regex, guided_regex                      regex
one of some texts                                         .choice, guided_choice
grammar                                                   .grammar, guided_grammar                  ebnf         grammar
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from petatron.base.errors import DataError
from petatron.infer.grammar import ANY_WHITESPACE
from petatron.infer.sampling_params import MAX_SEED, Constraint, SamplingParams
from petatron.infer.split_answer_parts import REASONING_TAGS
from petatron.infer.tool_calls import TOOL_MARKERS
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import (
    MAX_GRAMMAR_CHARS,
    ConstraintFields,
    PromptFields,
    ResponseFormat,
    SamplingFields,
)
from petatron.serve.serve_options import ServeLimits
from petatron.serve.served_model_properties import ModelCard

_CONSTRAINT_NAMES = {
    "json": ("json_schema",),
    "regex": ("regex",),
    "grammar": ("ebnf", "grammar"),
    "choice": (),
}
"""vLLM's names of constraints, and others' names of the same, which are fields of the body themselves."""
LEAST_TEMPERATURE = 1e-5
_LONG_TEXT_CHARS = 4096
"""Longer texts are encoded beside the event loop."""


class EncodedPrompt(NamedTuple):
    """A prompt's ids, and its text if it came as text."""

    ids: Sequence[int]
    text: str | None = None


async def encode_prompts(
    given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    body: PromptFields,
    model: ModelCard,
    limits: ServeLimits,
    *,
    param: str,
    prefix: Sequence[int] | None = None,
    suffix: Sequence[int] = (),
) -> list[EncodedPrompt]:
    """Returns one or several prompts of text or of token ids, truncated as the body says.

    prefix: ids before a text; by default those that the tokenizer puts before one, unless the body says otherwise. suffix: ids after it.
    """
    truncate = body.truncate_prompt_tokens
    if prefix is None:
        prefix = () if body.add_special_tokens is False else model.prefix_ids
    many = not isinstance(given, str) and not isinstance(given[0], int)
    prompts: Sequence[str | Sequence[int]] = given if many else [given]  # type: ignore[assignment]
    if len(prompts) > limits.max_batch:
        text = f"{len(prompts)} prompts are more than the {limits.max_batch} that one request may have."
        raise ApiError(400, text, param=param)
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str) and truncate is None:
            check_text(prompt, model, limits, param=param)
        if isinstance(prompt, str):
            ids = [*truncated([*prefix, *await encode_text(prompt, model)], body, model, beside=len(suffix)), *suffix]
        else:
            ids = truncated(prompt, body, model)
        check_prompt(ids, model, limits, param=param)
        encoded.append(EncodedPrompt(ids, prompt if isinstance(prompt, str) else None))
    return encoded


async def encode_text(text: str, model: ModelCard) -> list[int]:
    if len(text) > _LONG_TEXT_CHARS:
        return await asyncio.to_thread(model.encode, text)
    return model.encode(text)


def truncated(ids: Sequence[int], body: PromptFields, model: ModelCard, *, beside: int = 0) -> Sequence[int]:
    """Returns the last ids that truncate_prompt_tokens asks for: all with None, and what the model takes with -1.

    beside: the number of positions that are taken by other tokens.
    """
    count = body.truncate_prompt_tokens
    if count is None:
        return ids
    count = max((model.max_prompt_tokens if count < 0 else count) - beside, 0)
    if body.truncation_side == "right":
        return ids[:count]
    return ids[len(ids) - min(count, len(ids)) :]


def check_text(text: str, model: ModelCard, limits: ServeLimits, *, param: str) -> None:
    """Refuses a text that is too long whatever its tokens are, before it is encoded."""
    if model.max_token_bytes is None:
        return
    least = -(-len(text.encode(errors="replace")) // model.max_token_bytes)
    shown = least if model.max_token_bytes == 1 else f"at least {least}"
    _check_length(least, shown, model, limits, param=param)


def _check_length(count: int, shown: int | str, model: ModelCard, limits: ServeLimits, *, param: str) -> None:
    most = min(model.max_prompt_tokens, limits.max_prompt_tokens or model.max_prompt_tokens)
    if count > most:
        text = f"The prompt has {shown} tokens, and this server takes {most}. Shorten the prompt."
        raise ApiError(400, text, param=param, code="context_length_exceeded")


def check_prompt(ids: Sequence[int], model: ModelCard, limits: ServeLimits, *, param: str) -> None:
    if not ids:
        text = "The prompt is empty, and there is nothing to continue. Send at least one token."
        raise ApiError(400, text, param=param)
    _check_length(len(ids), len(ids), model, limits, param=param)
    check_ids(ids, model, param=param)


def check_ids(ids: Collection[int], model: ModelCard, *, param: str) -> None:
    if ids and max(ids) >= model.vocab_size:
        raise ApiError(400, f"Token id {max(ids)} is outside the vocabulary of {model.vocab_size} ids.", param=param)


def new_tokens(
    asked: int | None,
    default: int,
    prompts: Sequence[Sequence[int]],
    model: ModelCard,
    limits: ServeLimits,
    *,
    param: str = "max_tokens",
) -> int:
    """Returns how many tokens may be generated; what is not asked for is cut to what there is room for (`samples`)."""
    most = limits.max_tokens
    if asked is None:
        return default if most is None else min(default, most)
    if most is not None and asked > most:
        raise ApiError(400, f"{asked} tokens are more than the {most} that this server generates.", param=param)
    longest = max(len(ids) for ids in prompts)
    if asked > model.max_length - longest:
        text = f"A prompt of {longest} tokens leaves room for {model.max_length - longest} new ones, not {asked}."
        raise ApiError(400, text, param=param, code="context_length_exceeded")
    return asked


def sampling_params(
    body: SamplingFields,
    model: ModelCard,
    limits: ServeLimits,
    *,
    max_new_tokens: int,
    asked_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """asked_tokens: how many the request asks for; None: as many as there is room for."""
    if (body.n or 1) > limits.max_n:
        raise ApiError(400, f"n {body.n} is more than the {limits.max_n} that this server allows.", param="n")
    if (body.min_tokens or 0) > max_new_tokens and asked_tokens is not None:
        text = f"min_tokens {body.min_tokens} is more than the {asked_tokens} tokens that the answer may have."
        raise ApiError(400, text, param="min_tokens")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    extra_ids, allowed = body.stop_token_ids or [], body.allowed_token_ids
    for param, ids in (("logit_bias", bias), ("stop_token_ids", extra_ids), ("allowed_token_ids", allowed)):
        check_ids(ids or (), model, param=param)
    if stops and model.tokenizer is None:
        raise DataError("The served model has no tokenizer, so it cannot stop at a text. Use stop_token_ids.")
    # At the beginning of a text and after a space, where most vocabularies have other tokens for a word.
    bad_words = [text for word in body.bad_words or [] for text in (word.lstrip() or word, " " + word.lstrip())]
    bad_words_ids = tuple(dict.fromkeys(ids for text in bad_words if (ids := tuple(model.encode(text)))))
    defaults = model.sampling_defaults
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(body.min_tokens or 0, max_new_tokens),
        temperature=stable_temperature(_first(body.temperature, defaults.temperature, 1.0)),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(body.presence_penalty, 0.0),
        frequency_penalty=_first(body.frequency_penalty, 0.0),
        logit_bias=bias,
        allowed_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        bad_words_ids=bad_words_ids,
        seed=secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED,
        stop_ids=tuple(sorted({*(() if body.ignore_eos else model.stop_ids), *extra_ids})),
        stop_strings=tuple(dict.fromkeys(stops)),
        keep_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        hidden_ids=() if body.skip_special_tokens is False else _hidden_ids(model, stops),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prefix_group=body.cache_salt or "",
        adapter=model.adapter,
        constraint=request_constraint(body),
    )


def _hidden_ids(model: ModelCard, stops: Sequence[str]) -> tuple[int, ...]:
    """Returns the special ids but those that are read from the answer's text: marks of its parts, and what it stops at."""
    marks = {*TOOL_MARKERS, *(tag for tags in REASONING_TAGS.values() for tag in tags)}
    return tuple(
        token
        for token, name in model.texts.special_ids.items()
        if name not in marks and not any(name in stop for stop in stops)
    )


def samples(
    prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, model: ModelCard
) -> Iterator[tuple[Sequence[int], SamplingParams]]:
    """Yields n sequences for each prompt. Draws depend on the seed and the sample's number, which goes on where prompts are equal:
    a prompt gets the answers that it would get alone, and the same prompt twice does not get the same answers twice."""
    seen: Counter[tuple[int, ...]] = Counter()
    for ids in prompts:
        before = seen[tuple(ids)]
        seen[tuple(ids)] += n
        room = min(params.max_new_tokens, model.max_length - len(ids))
        for number in range(before, before + n):
            least = min(params.min_new_tokens, room)
            yield ids, replace(params, sample=number, max_new_tokens=room, min_new_tokens=least)


def stable_temperature(asked: float) -> float:
    """Returns 0, which is greedy, for what would divide logits to infinity and draw the same."""
    return 0.0 if asked < LEAST_TEMPERATURE else asked


def _first(*values: float | None) -> float:
    """Returns the first that is given; the last one is."""
    return next(value for value in values if value is not None)


def request_constraint(body: ConstraintFields) -> Constraint | None:
    """Returns what the answer must match; raises `ApiError` for two constraints at once."""
    whitespace = _whitespace(body)
    constraints = list(_constraints(body, whitespace))
    if not constraints and whitespace is not None:
        param = "guided_whitespace_pattern" if body.guided_whitespace_pattern else "structured_outputs"
        raise ApiError(400, "White space is one of JSON constraints, and the request has none.", param=param)
    if not constraints:
        return None
    (name, constraint), *others = constraints
    text = None
    if others:
        names = " and ".join(name for name, _ in constraints)
        name, text = others[0][0], f"{names} are two constraints of one answer. Send one."
    elif whitespace is not None and constraint.kind not in ("json", "json_schema"):
        text = f"White space is one of JSON constraints, and {name} is none."
    elif len(constraint.grammar) > MAX_GRAMMAR_CHARS:
        size = len(constraint.grammar)
        text = f"{name} has {size} characters, more than the {MAX_GRAMMAR_CHARS} that this server takes."
    if text is not None:
        raise ApiError(400, text, param=name.partition(".")[0])
    return constraint


def _whitespace(body: ConstraintFields) -> str | None:
    """Returns what may be between the parts of JSON; None: nothing."""
    options = body.structured_outputs
    pattern = body.guided_whitespace_pattern or (None if options is None else options.whitespace_pattern)
    flexible = options is not None and options.disable_any_whitespace is False
    if pattern is not None and options is not None and options.disable_any_whitespace:
        text = "disable_any_whitespace and a pattern of white space exclude each other."
        raise ApiError(400, text, param="structured_outputs")
    return ANY_WHITESPACE if pattern is None and flexible else pattern


def _constraints(body: ConstraintFields, whitespace: str | None) -> Iterator[tuple[str, Constraint]]:
    """Yields the name and the constraint of each field that asks for one."""
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _of_format(body.response_format, whitespace)
    vllm = body.structured_outputs
    for kind, others in _CONSTRAINT_NAMES.items():
        given = {f"structured_outputs.{kind}": getattr(vllm, "json_" if kind == "json" else kind, None)}
        given |= {name: getattr(body, name) for name in (f"guided_{kind}", *others)}
        for name, value in given.items():
            if value is not None and (value or name != "grammar"):  # llama.cpp's clients send "" for none
                yield name, _constraint(kind, value, whitespace)
    if body.guided_json_object or (vllm is not None and vllm.json_object):
        name = "guided_json_object" if body.guided_json_object else "structured_outputs.json_object"
        yield name, Constraint(kind="json", whitespace=whitespace)


def _constraint(kind: str, value: Any, whitespace: str | None) -> Constraint:
    """A schema may be text, as vLLM and SGLang take it."""
    if kind == "json":
        grammar = value if isinstance(value, str) else json.dumps(value)
        return Constraint(kind="json_schema", grammar=grammar, whitespace=whitespace)
    if kind == "choice":
        return Constraint(kind="grammar", grammar=choice_grammar(value))
    return Constraint(kind="regex" if kind == "regex" else "grammar", grammar=value)


def _of_format(wanted: ResponseFormat, whitespace: str | None) -> Constraint:
    if wanted.type == "regex":
        return Constraint(kind="regex", grammar=wanted.regex or "")
    if wanted.type == "json_object" and wanted.schema_ is None:
        return Constraint(kind="json", whitespace=whitespace)
    schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
    return _constraint("json", {} if schema is None else schema, whitespace)


def choice_grammar(choices: Sequence[str]) -> str:
    """Returns the grammar of some texts.

    >>> choice_grammar(["yes", 'no "more"'])
    'start: "yes" | "no \\\\"more\\\\""'
    """
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
