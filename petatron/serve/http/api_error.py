"""API errors as clients get them: OpenAI's object, with a real status code, and nothing of the server's inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from petatron.base.errors import ConfigError, PetatronError, RequestError
from petatron.serve.generation_handle import NotServingError, QueueFullError

RETRY_AFTER_S = 1
_ALTERNATIVE = re.compile(r"\[|^(str|int|float|bool|constrained-\w+|[A-Z]\w+)$")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the request that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def content(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.content(), self.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """Returns the answer to a request that ended in an error; what is not the client's tells nothing of its cause."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _validation_error(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, NotServingError):
        return ApiError(503, str(error), code="not_serving")
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request took longer than this server allows.", code="timeout")
    if isinstance(error, ConfigError):
        return ApiError(400, " ".join(str(problem) for problem in error.problems), param=error.problems[0].where)
    if isinstance(error, PetatronError) and not isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, "The server failed to answer. Its log has the cause.", code="internal_error")


def _validation_error(error: ValidationError) -> ApiError:
    """Names every wrong field of the body, with one reason."""
    fields: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        fields.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)
    text = "; ".join(_reason(details) for details in list(fields.values())[:8])
    return ApiError(400, text, param=next(iter(fields)) or None, code="invalid_value")


def _reason(details: Sequence[ErrorDetails]) -> str:
    """Of a union's alternatives, the one whose type the value has tells most; then the one that came furthest."""
    typed = [detail for detail in details if not detail["type"].endswith("_type")] or details
    paths = [_path(detail["loc"]) for detail in typed]
    path = max(paths, key=lambda candidate: candidate.count("."))
    messages = [detail["msg"] for detail, detail_path in zip(typed, paths) if detail_path == path]
    reasons = dict.fromkeys(message.removeprefix("Value error, ") for message in messages)
    first, *others = reasons
    alternatives = [text.removeprefix("Input should be ") for text in others if text.startswith("Input should be ")]
    return f"{path}: {' or '.join([first, *alternatives])}"


def _path(location: tuple[int | str, ...]) -> str:
    """Returns a field as the client wrote it: pydantic also names the alternatives of a union, such as constrained-str."""
    return ".".join(str(part)[:40] for part in location if not _ALTERNATIVE.search(str(part))) or "body"
