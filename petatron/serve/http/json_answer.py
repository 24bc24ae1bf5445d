"""JSON of answers that may be large: written beside the event loop, a slice at a time, so that other threads run meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import Response

_SLICE_ITEMS = 2048
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def large_answer(make: Callable[[], Mapping[str, Any]]) -> Response:
    """Returns the answer that `make` makes, which runs beside the event loop too."""
    content = await asyncio.to_thread(lambda: json_bytes(make()))
    return Response(content, media_type="application/json")


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Returns an object as JSON.

    >>> json_bytes({"a": 1, "b": list(range(3)), "c": []})
    b'{"a":1,"b":[0,1,2],"c":[]}'
    """
    parts = [f"{_JSON.encode(name)}:{''.join(_pieces(value))}" for name, value in content.items()]
    return f"{{{','.join(parts)}}}".encode()


def _pieces(value: Any) -> Iterator[str]:
    """To encode a long list is one call of C, in which no other thread runs: so it is encoded in slices."""
    if not isinstance(value, list) or len(value) <= _SLICE_ITEMS:
        yield _JSON.encode(value)
        return
    for begin in range(0, len(value), _SLICE_ITEMS):
        yield ("," if begin else "[") + _JSON.encode(value[begin : begin + _SLICE_ITEMS])[1:-1]
    yield "]"
