"""Reads and validates a request's JSON body, judges its unknown fields, and describes bodies in OpenAPI.

A body of megabytes may have millions of values. To parse them takes a second in which nothing else runs, and a validator that collects an
error for each takes gigabytes. So values are counted in the bytes before they are parsed, lists are validated up to their first error,
and a large body is read beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
from fastapi import Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import SchemaValidator, core_schema

from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import NestedFields, OpenAIRequest
from petatron.serve.http.request_field_rules import IGNORED_HEADER, FieldRule, check_extra_fields, header_value
from petatron.serve.http.server_state import state_of

Body = TypeVar("Body", bound=BaseModel)
OpenAIBody = TypeVar("OpenAIBody", bound=OpenAIRequest)
Route = Callable[[Request], Awaitable[Response]]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_REF = "#/components/schemas/{model}"
_LARGE_BODY_BYTES = 1 << 14
"""Larger ones are read beside the event loop."""
LEAST_BODY_VALUES, MAX_BODY_KEYS = 1 << 17, 1 << 15
"""A body may have this many values, or twice the number of the model's positions if that is more: prompts may be token ids."""


async def read_body(request: Request, model: type[Body], *, any_type: bool = False) -> Body:
    """Returns the body as a model.

    Only JSON's own content type is taken: a page of another site can send others to a server on this machine without asking the browser.
    any_type: for methods that a browser asks for in any case, such as the PUT that curl sends as a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not any_type and kind != "application/json":
        raise ApiError(415, "Send JSON, with the header Content-Type: application/json.", code="unsupported_media_type")
    content = await request.body()
    max_values = max(LEAST_BODY_VALUES, 2 * state_of(request).model.max_prompt_tokens)
    if len(content) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(_read_model, content, model, max_values)
    return _read_model(content, model, max_values)


def _read_model(content: bytes, model: type[Body], max_values: int) -> Body:
    counts = BodyCounts.of(content, max_values)
    if counts.num_values > max_values or counts.num_keys > MAX_BODY_KEYS:
        most = f"{max_values} values or {MAX_BODY_KEYS} keys"
        text = f"The body has more than {most}. Send less in one request, or texts instead of token ids."
        raise ApiError(400, text, code="too_many_values")
    return _first_errors_validator(model).validate_python(parse_json(content))


class BodyCounts(NamedTuple):
    """Of JSON text: exact where they come near what is allowed, else with the commas, colons and brackets inside its texts.

    >>> BodyCounts.of(b'{"a": [1, 2], "b": "x, [:,"}', 3)
    BodyCounts(num_values=5, num_keys=2)
    """

    num_values: int
    num_keys: int

    @classmethod
    def of(cls, content: bytes, max_values: int) -> BodyCounts:
        counts = cls._count(content)
        too_many = counts.num_values > max_values or counts.num_keys > MAX_BODY_KEYS
        if not too_many or content.count(b'"') > 2 * max_values:
            return counts
        return cls._count(b"".join(content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]))

    @classmethod
    def _count(cls, content: bytes) -> BodyCounts:
        values = np.frombuffer(content, dtype=np.uint8)  # `bytes.count` takes ten times as long where there are many
        commas, lists, objects, keys = (int(np.count_nonzero(values == ord(mark))) for mark in ",[{:")
        return cls(1 + commas + lists + objects, keys)


@cache
def _first_errors_validator(model: type[BaseModel]) -> SchemaValidator:
    """A model's validator that stops in each list at the first item that is wrong, and at objects of too many keys."""

    def stops_early(schema: Any) -> Any:
        if isinstance(schema, dict):
            changed = {key: stops_early(value) for key, value in schema.items()}
            if schema.get("type") == "dict" and (most := schema.get("max_length")) is not None:
                return core_schema.no_info_before_validator_function(partial(_check_keys, most), cast(Any, changed))
            return {**changed, "fail_fast": True} if schema.get("type") == "list" else changed
        return [stops_early(item) for item in schema] if isinstance(schema, list) else schema

    schema = stops_early(model.__pydantic_core_schema__)
    try:  # else it would take the validators that the classes have already
        return SchemaValidator(schema, _use_prebuilt=False)  # pyright: ignore[reportCallIssue]
    except TypeError:  # versions that know no others
        return SchemaValidator(schema)


def parse_json(content: bytes) -> Any:
    """Returns a JSON value; NaN, infinities, halves of surrogate pairs and absurd nesting are no JSON."""
    try:
        value = json.loads(content.decode(), parse_constant=_refuse_constant)
        if _SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        detail = f" at character {error.pos}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"The body is not valid JSON{detail}.", code="invalid_json") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_keys(most: int, value: Any) -> Any:
    """Refuses an object of too many keys as a whole: else there would be an error for each."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"has {len(value)} keys, and may have {most}")
    return value


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns what a route says of its body in the schema."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_components(models: list[type[BaseModel]]) -> dict[str, Any]:
    """Returns the schemas that `body_schema` refers to."""
    _, schema = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    return schema.get("$defs", {})


async def read_request(
    request: Request, body: type[OpenAIBody], *, others: Mapping[str, FieldRule] | None = None
) -> OpenAIBody:
    """Returns the body; raises `ApiError` for refused fields, and notes unknown ones for `naming_ignored_fields`."""
    content = await read_body(request, body)
    request.state.ignored_fields = check_extra_fields(content.model_extra or {}, others=others)
    ignore_fields(request, nested_unknown_fields(content))
    return content


def ignore_fields(request: Request, names: Iterable[str]) -> None:
    """Notes fields that have no effect on this request, for `naming_ignored_fields`."""
    request.state.ignored_fields = [*request.state.ignored_fields, *names]


def nested_unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yields the unknown fields of objects inside a body, such as stream_options.include_use."""
    given = body.model_fields_set
    for name in [name for name in type(body).model_fields if name in given]:
        value = getattr(body, name)
        if isinstance(value, NestedFields):
            path = f"{prefix}{type(body).model_fields[name].alias or name}"
            yield from (f"{path}.{extra}" for extra in value.model_extra or {})
            yield from nested_unknown_fields(value, f"{path}.")


def naming_ignored_fields(route: Route) -> Route:
    """Wraps a route so that its answer names the fields of the request that were ignored."""

    async def wrapped(request: Request) -> Response:
        answer = await route(request)
        if names := getattr(request.state, "ignored_fields", None):
            answer.headers[IGNORED_HEADER] = header_value(names)
        return answer

    wrapped.__name__, wrapped.__doc__ = route.__name__, route.__doc__
    return wrapped
