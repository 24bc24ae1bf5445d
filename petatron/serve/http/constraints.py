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

_KINDS = {
    "json": ("json_schema",),
    "regex": ("regex",),
    "grammar": ("ebnf", "grammar"),
    "choice": (),
}
"""vLLM's names of constraints, and others' names of the same, which are fields of the body themselves."""


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
    for kind, others in _KINDS.items():
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
