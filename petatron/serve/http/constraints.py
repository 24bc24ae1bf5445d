"""The constraint of a request, under whichever name it came.

what               OpenAI                                 vLLM, now and before                      SGLang       llama.cpp
JSON schema        response_format type json_schema       structured_outputs.json, guided_json      json_schema  json_schema
any JSON object    response_format type json_object       .json_object, guided_json_object
regex              response_format type regex (ours)      .regex, guided_regex                      regex
one of some texts                                         .choice, guided_choice
grammar                                                   .grammar, guided_grammar                  ebnf         grammar
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from petatron.infer.grammar import ANY_WHITESPACE
from petatron.infer.sampling_params import Constraint
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import MAX_GRAMMAR_CHARS, ConstraintFields, ResponseFormat


def request_constraint(body: ConstraintFields) -> Constraint | None:
    """Returns what the answer must match; raises `ApiError` for two constraints at once."""
    whitespace = _whitespace(body)
    constraints = list(_constraints(body, whitespace))
    if len(constraints) > 1:
        names = " and ".join(name for name, _ in constraints)
        raise ApiError(
            400, f"{names} are two constraints of one answer. Send one.", param=constraints[1][0].partition(".")[0]
        )
    if not constraints:
        if whitespace is not None:
            text = "White space is one of JSON constraints, and the request has none."
            raise ApiError(
                400, text, param="guided_whitespace_pattern" if body.guided_whitespace_pattern else "structured_outputs"
            )
        return None
    name, constraint = constraints[0]
    if whitespace is not None and constraint.kind not in ("json", "json_schema"):
        raise ApiError(
            400, f"White space is one of JSON constraints, and {name} is none.", param=name.partition(".")[0]
        )
    if len(constraint.grammar) > MAX_GRAMMAR_CHARS:
        text = f"{name} has {len(constraint.grammar)} characters, more than the {MAX_GRAMMAR_CHARS} that this server takes."
        raise ApiError(400, text, param=name.partition(".")[0])
    return constraint


def _whitespace(body: ConstraintFields) -> str | None:
    """Returns what may be between the parts of JSON; None: nothing."""
    options = body.structured_outputs
    pattern = body.guided_whitespace_pattern or (None if options is None else options.whitespace_pattern)
    flexible = options is not None and options.disable_any_whitespace is False
    if pattern is not None and options is not None and options.disable_any_whitespace:
        raise ApiError(
            400, "disable_any_whitespace and a pattern of white space exclude each other.", param="structured_outputs"
        )
    return ANY_WHITESPACE if pattern is None and flexible else pattern


def _constraints(body: ConstraintFields, whitespace: str | None) -> Iterator[tuple[str, Constraint]]:
    """Yields the name and the constraint of each field that asks for one."""
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _of_format(body.response_format, whitespace)
    vllm = body.structured_outputs
    for name, schema in (
        ("structured_outputs.json", None if vllm is None else vllm.json_),
        ("guided_json", body.guided_json),
        ("json_schema", body.json_schema),
    ):
        if schema is not None:
            yield name, _json_schema(schema, whitespace)
    for name, kind, grammar in (
        ("structured_outputs.regex", "regex", None if vllm is None else vllm.regex),
        ("guided_regex", "regex", body.guided_regex),
        ("regex", "regex", body.regex),
        ("structured_outputs.grammar", "grammar", None if vllm is None else vllm.grammar),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("ebnf", "grammar", body.ebnf),
        ("grammar", "grammar", body.grammar or None),  # llama.cpp's clients send "" for none
    ):
        if grammar is not None:
            yield name, Constraint(kind="regex" if kind == "regex" else "grammar", grammar=grammar)
    for name, choices in (
        ("structured_outputs.choice", None if vllm is None else vllm.choice),
        ("guided_choice", body.guided_choice),
    ):
        if choices is not None:
            yield name, Constraint(kind="grammar", grammar=choice_grammar(choices))
    if body.guided_json_object or (vllm is not None and vllm.json_object):
        name = "guided_json_object" if body.guided_json_object else "structured_outputs.json_object"
        yield name, Constraint(kind="json", whitespace=whitespace)


def _of_format(wanted: ResponseFormat, whitespace: str | None) -> Constraint:
    if wanted.type == "regex":
        return Constraint(kind="regex", grammar=wanted.regex or "")
    if wanted.type == "json_object" and wanted.schema_ is None:
        return Constraint(kind="json", whitespace=whitespace)
    schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
    return _json_schema({} if schema is None else schema, whitespace)


def _json_schema(schema: str | dict[str, Any] | bool, whitespace: str | None) -> Constraint:
    """A text is the schema in JSON, as vLLM and SGLang take it."""
    grammar = schema if isinstance(schema, str) else json.dumps(schema)
    return Constraint(kind="json_schema", grammar=grammar, whitespace=whitespace)


def choice_grammar(choices: Sequence[str]) -> str:
    """Returns the grammar of some texts.

    >>> choice_grammar(["yes", 'no "more"'])
    'start: "yes" | "no \\\\"more\\\\""'
    """
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
