"""Reads the body of an OpenAI route, and judges the fields that it does not have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from petatron.serve.http.json_body import read_body
from petatron.serve.http.openai_requests import NestedFields, OpenAIRequest
from petatron.serve.http.request_fields import IGNORED_HEADER, FieldRule, check_extra_fields, header_value

OpenAIBody = TypeVar("OpenAIBody", bound=OpenAIRequest)
Route = Callable[[Request], Awaitable[Response]]


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
