"""JSON of answers that may be large: made and written beside the event loop, in pieces, so that other threads run meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import Response

_SLICE_ITEMS = 1024
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def large_answer(make: Callable[[], Mapping[str, Any]]) -> Response:
    """Returns the answer that `make` makes, which runs beside the event loop too."""
    content = await asyncio.to_thread(lambda: json_bytes(make()))
    return Response(content, media_type="application/json")


def json_bytes(content: Any) -> bytes:
    """Returns a value as JSON.

    >>> json_bytes({"a": 1, "b": list(range(3)), "c": [], "d": [{"é": [None]}]}).decode()
    '{"a":1,"b":[0,1,2],"c":[],"d":[{"é":[null]}]}'
    """
    return "".join(_pieces(content)).encode()


def _pieces(value: Any) -> Iterator[str]:
    """To encode a large value is one call of C, in which no other thread runs: so it is taken apart."""
    if isinstance(value, Mapping) and value:
        for number, (name, inner) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_JSON.encode(name)}:"
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, list) and len(value) > _SLICE_ITEMS:
        for begin in range(0, len(value), _SLICE_ITEMS):
            yield ("," if begin else "[") + _JSON.encode(value[begin : begin + _SLICE_ITEMS])[1:-1]
        yield "]"
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        for number, inner in enumerate(value):
            yield "," if number else "["
            yield from _pieces(inner)
        yield "]"
    else:
        yield _JSON.encode(value)
