"""Limits of a tokenizer.json: the rows that its ids ask of an embedding, and how much longer it may make a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable

MAX_UNUSED_IDS = 1 << 16
MAX_GROWTH = 256
"""Published tokenizers replace a character by at most a few; a few replacements by ten characters in a row make gigabytes of a line."""


def vocabulary_rows(path: str | Path, fast: FastTokenizer) -> int:
    """Returns the highest id plus one. Published tokenizers skip some ids, but not most of them."""
    ids = fast.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > 2 * len(ids) + MAX_UNUSED_IDS:
        token = printable(max(ids, key=lambda name: ids[name]), max_chars=40)
        raise DataError(
            f"{path} gives the token {token!r} the id {size - 1:,}, but has only {len(ids):,} tokens. A model would need a row for "
            "every id; use a tokenizer that numbers its tokens without such gaps."
        )
    return size


def check_growth(file: Path, fast: FastTokenizer) -> None:
    """Raises `DataError` for a tokenizer whose normalizer or decoder could make a text more than `MAX_GROWTH` times as long."""
    for what, part in (("normalizer", fast.normalizer), ("decoder", fast.decoder)):
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MAX_GROWTH:
            raise DataError(
                f"The {what} of {file} may make a text {growth:,} times as long, and {MAX_GROWTH} times is allowed. "
                "Remove replacements by long texts from it."
            )


def _growth(part: Any) -> int:
    """Returns the factor of a part and of all inside it, one after the other.

    >>> _growth({"type": "Replace", "pattern": {"String": "ab"}, "content": "12345"})
    3
    """
    if isinstance(part, list):
        factor = 1
        for inner in part:
            factor = min(factor * _growth(inner), 1 << 62)
        return factor
    if not isinstance(part, dict):
        return 1
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        # A regular expression may match every character, and the empty text between any two.
        content, size = len(part.get("content") or ""), len(pattern.get("String") or "")
        return max(1, -(-content // size) if size else content + 1)
    return _growth([inner for inner in part.values() if isinstance(inner, list | dict)])
