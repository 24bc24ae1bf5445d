"""Reads a request's body: bounded, strict JSON, checked by a model; and describes it in the OpenAPI schema."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from petatron.serve.http.api_error import ApiError

Body = TypeVar("Body", bound=BaseModel)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[Body], *, any_type: bool = False) -> Body:
    """Returns the body as a model.

    Only JSON's own content type is taken: a page of another site can send others to a server on this machine without asking the browser.
    any_type: for methods that a browser asks for in any case, such as the PUT that curl sends as a form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not any_type and kind != "application/json":
        raise ApiError(415, "Send JSON, with the header Content-Type: application/json.", code="unsupported_media_type")
    return model.model_validate(parse_json(await request.body()))


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


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns what a route says of its body in the schema."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_components(models: list[type[BaseModel]]) -> dict[str, Any]:
    """Returns the schemas that `body_schema` refers to."""
    _, schema = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    return schema.get("$defs", {})
