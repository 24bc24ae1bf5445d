"""Parses a line of JSON to an object and its repeated keys: of these Python takes the last, other readers the first."""

from __future__ import annotations

import json
from collections import Counter

from petatron.base.terminal_escape import printable

MAX_ID_CHARACTERS = 1000
TextValue = str | list[str]


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


def repeated_keys(record: object) -> set[str]:
    """Returns the keys that an object of `parse_record` has more than once."""
    return record.names if isinstance(record, RepeatedKeys) else set()


def document_id(record: object, key: str) -> bytes:
    """Returns what an object says under a key as text of at most MAX_ID_CHARACTERS; nothing where it says nothing.

    >>> document_id({"id": 7}, "id"), document_id({"id": None}, "id"), document_id({}, "id")
    (b'7', b'', b'')
    """
    value = record.get(key) if isinstance(record, dict) else None
    if value is None:
        return b""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:MAX_ID_CHARACTERS].encode(errors="replace")


def text_value(record: object, key: str) -> TextValue:
    """Returns the text, or the texts, under a key of a line of JSON; `ValueError` if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    if key not in record:
        present = ", ".join(printable(name, max_chars=40) for name in sorted(record)[:8]) or "none"
        raise ValueError(f"no key {key!r} (keys here: {present})")
    if key in repeated_keys(record):
        raise ValueError(f"the key {key!r} is there twice")
    value = record[key]
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value)):
        return value
    raise ValueError(f"key {key!r} holds neither a string nor a list of strings")
