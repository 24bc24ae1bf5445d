"""Posts JSON to a server of a user's own, for rewards and environments.

What may be well with the next attempt is tried again, with growing pauses: no connection, and the statuses 429, 502, 503 and 504. All
attempts together have the time of one request.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from petatron.posttrain.rewards.function_pool import RewardFailure

HTTP_SCHEMES = ("http://", "https://")
_PASSING = (429, 502, 503, 504)
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25
_MAX_BYTES = 1 << 26
_MAX_SHOWN_CHARS = 200


def post_json(url: str, value: Any, *, timeout_s: float) -> Any:
    """Returns the JSON value that a server answers with; raises `RewardFailure` if it does not, in `timeout_s` seconds."""
    data = json.dumps(value).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", "Accept": "application/json"})
    end = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=max(0.01, end - time.monotonic())) as response:
                return _read_json(response, end, url, timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                shown = error.read(_MAX_SHOWN_CHARS).decode(errors="replace").strip()
            reason = f"{url} answered with the status {error.code}{': ' + shown if shown else ''}"
            passing = error.code in _PASSING
        except TimeoutError:
            raise RewardFailure(f"{url} did not answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise RewardFailure(f"{url} did not answer within {timeout_s:g} s") from None
            reason, passing = f"{url} cannot be reached: {cause or type(error).__name__}", True
        if not passing or attempt == _ATTEMPTS or time.monotonic() + pause_s >= end:
            raise RewardFailure(reason)
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("the last attempt returns or raises")


def _read_json(response: http.client.HTTPResponse, end: float, url: str, timeout_s: float) -> Any:
    """Reads an answer in parts: a server that sends a byte now and then has no more time than another."""
    content = bytearray()
    while part := response.read1(1 << 16):
        content += part
        if time.monotonic() > end:
            raise TimeoutError
        if len(content) > _MAX_BYTES:
            raise RewardFailure(f"{url} answered with more than {_MAX_BYTES:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = content[:_MAX_SHOWN_CHARS].decode(errors="replace")
        raise RewardFailure(f"{url} did not answer with JSON but {shown!r}") from error
