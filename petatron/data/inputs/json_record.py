"""A line of JSON as an object that says which of its keys are there twice: Python takes the last, other readers the first."""

from __future__ import annotations

import json
from collections import Counter


class RepeatedKeys(dict[str, object]):
    """An object of which `names` are there more than once."""

    __slots__ = ("names",)

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.names = {name for name, count in Counter(name for name, _ in pairs).items() if count > 1}


def parse_record(line: str | bytes) -> object:
    """Parses a line as `json.loads` does.

    >>> parse_record('{"text": "a", "text": "b"}').names
    {'text'}
    """
    return json.loads(line, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    return record if len(record) == len(pairs) else RepeatedKeys(pairs)
