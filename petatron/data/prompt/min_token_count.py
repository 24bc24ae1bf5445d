"""A lower bound of the number of tokens of a text, known without encoding it."""

from __future__ import annotations

import json
import math
from typing import Any

from petatron.data.bpe.byte_level_decoder import byte_characters
from petatron.data.tokenizer import ByteTokenizer, Tokenizer

_SAME_BYTES = ("Prepend", "NFD", "NFKD")
"""Normalizers that never shorten a text."""
_NFC_SHRINKAGE = 4
"""Composed characters have at least a third of the bytes of their parts (Hangul: nine become three)."""

_DROPS_TEXT = ("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "BertPreTokenizer")


def max_token_bytes(tokenizer: Tokenizer | None) -> int | None:
    """Returns the most bytes of text that one token stands for; None if there is no such bound.

    A vocabulary without its bytes has none: an unknown token may be a text of any length. Nor has one whose normalizer may remove
    text, or that has tokens which take in the white space around them.

    >>> max_token_bytes(ByteTokenizer())
    1
    """
    if isinstance(tokenizer, ByteTokenizer):
        return 1
    content = None if tokenizer is None else tokenizer.files().get("tokenizer.json")
    if content is None:
        return None
    read = json.loads(content)
    model, added = read.get("model") or {}, read.get("added_tokens") or []
    factor = _shrinkage(read.get("normalizer"))
    if factor is None or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if model.get("type") != "BPE" or not _keeps_bytes(model, read.get("pre_tokenizer")):
        return None
    names = [*model["vocab"], *(token["content"] for token in added)]
    return factor * max(len(name.encode(errors="replace")) for name in names)


def _shrinkage(normalizer: Any) -> int | None:
    """Returns the largest factor by which a normalizer may shorten a text in bytes; None if there is no bound."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        factors = [_shrinkage(part) for part in normalizer.get("normalizers") or []]
        return None if None in factors else math.prod(factor or 1 for factor in factors)
    if kind == "NFC":
        return _NFC_SHRINKAGE
    if kind == "Replace":
        pattern = (normalizer.get("pattern") or {}).get("String")
        return 1 if pattern and len(normalizer.get("content", "").encode()) >= len(pattern.encode()) else None
    return 1 if kind in _SAME_BYTES else None


def _keeps_bytes(model: Any, pre_tokenizer: Any) -> bool:
    """Whether every byte has a token, and none is dropped before the model sees it."""
    parts = [] if pre_tokenizer is None else [pre_tokenizer]
    byte_level = False
    while parts:
        part = parts.pop()
        parts += part.get("pretokenizers") or []
        byte_level |= part.get("type") == "ByteLevel"
        if part.get("behavior") == "Removed" or part.get("type") in _DROPS_TEXT:
            return False
    alphabet = byte_characters() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = model.get("vocab") or {}
    return (byte_level or bool(model.get("byte_fallback"))) and all(char in vocabulary for char in alphabet)
