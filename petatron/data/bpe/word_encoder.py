"""Encodes byte-level BPE by looking words up: the library tokenizes a word once, and a dictionary knows its ids from then on.

Most of the library's time is spent dividing a text into words and finding each again. Here a text of ASCII characters is divided by
Python's `re`, and the ids of every word are looked up, which gives the ids of the library in a fraction of the time. What
other characters are (letters, numbers, white space) depends on the version of Unicode that a program has, so a text that has any is
cut before spaces that follow something else, where every pattern here begins a word; the library encodes the pieces that are not ASCII.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import is_normalized

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers

from petatron.data.bpe.pre_tokenizer_patterns import GPT2, GPT2_DIGITS, SPLIT_PATTERNS

MAX_WORDS = 1 << 17
"""Words that are kept, some 30 MB; the rest of a text goes to the library each time."""
MAX_WORD_CHARS = 32
_WHITE_SPACE = r"\t-\r "
_ASCII_CLASSES = {
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{L}": "A-Za-z",
    r"\p{N}": "0-9",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
    r"\s": _WHITE_SPACE,
}

_KEEP_MATCHES = (("Isolated", False), ("Removed", True))
"""Both spellings keep what the pattern matches, and every character is in a match."""


class WordEncoder:
    """Encodes texts with the ids of a tokenizer of the library whose words a pattern divides."""

    def __init__(self, fast: FastTokenizer, split: str) -> None:
        self._fast = fast
        self._split = split
        self._words_of = re.compile(ascii_pattern(split)).findall
        names = [re.escape(token.content) for token in fast.get_added_tokens_decoder().values()]
        self._find_added = re.compile("|".join(names)).search if names else None
        self._ids: dict[str, Sequence[int]] = {}

    def __reduce__(self) -> tuple[type[WordEncoder], tuple[FastTokenizer, str]]:
        return WordEncoder, (self._fast, self._split)

    def encode(self, text: str) -> list[int]:
        # The name of an added token may also come about when a text is normalized.
        if self._find_added is not None and (self._find_added(text) or not is_normalized("NFC", text)):
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids: list[int] = []
        if text.isascii():
            self._add_words(text, ids)
            return ids
        for piece in _pieces(text):
            known = self._ids.get(piece)
            if known is not None:
                ids += known
            elif piece.isascii():
                self._add_words(piece, ids)
            else:
                ids += self._learn(piece)
        return ids

    def _add_words(self, text: str, ids: list[int]) -> None:
        get, extend = self._ids.get, ids.extend
        for word in self._words_of(text):
            known = get(word)
            extend(self._learn(word) if known is None else known)

    def _learn(self, word: str) -> Sequence[int]:
        ids = self._fast.encode(word, add_special_tokens=False).ids
        if len(word) <= MAX_WORD_CHARS and len(self._ids) < MAX_WORDS:
            self._ids[word] = tuple(ids)
        return ids


def word_encoder(fast: FastTokenizer) -> WordEncoder | None:
    """Returns an encoder with the ids of a tokenizer; None for one whose words no known pattern divides."""
    model, normalizer = fast.model, fast.normalizer
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    # Composition never reaches across a space, so a piece alone is normalized as it is in its text.
    if not (normalizer is None or isinstance(normalizer, normalizers.NFC)) or fast.pre_tokenizer is None:
        return None
    split = _split_pattern(json.loads(fast.pre_tokenizer.__getstate__()))
    return None if split is None else WordEncoder(fast, split)


def ascii_pattern(split: str) -> str:
    r"""Returns a pattern for Python's `re` that divides ASCII characters as a pattern of the library does.

    >>> ascii_pattern(r" ?\p{L}+|\s+(?!\S)| ?[^\s\p{L}]+")
    ' ?[A-Za-z]+|[\\t-\\r ]+(?![^\\t-\\r ])| ?[^\\t-\\r A-Za-z]+'
    """
    return "".join(_ascii_parts(split))


def _ascii_parts(split: str) -> Iterator[str]:
    for part in re.findall(r"\[[^\]]*\]|\\p\{\w+\}|\\.|.", split):
        if part.startswith("["):
            for name, characters in _ASCII_CLASSES.items():
                part = part.replace(name, characters)
            yield part
        elif part == r"\S":
            yield f"[^{_WHITE_SPACE}]"
        elif part in _ASCII_CLASSES:
            yield f"[{_ASCII_CLASSES[part]}]"
        else:
            yield part


def _split_pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            return GPT2_DIGITS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": behavior, "invert": inverted},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if split in SPLIT_PATTERNS and (behavior, inverted) in _KEEP_MATCHES:
            return split
    return None


def _pieces(text: str) -> Iterator[str]:
    """Yields pieces that make up a text: one begins at a space after a letter, a number or a printable ASCII character."""
    pending, space = "", ""
    for part in text.split(" "):
        pending += space + part
        space = " "
        if part and ("!" <= part[-1] <= "~" or part[-1].isalnum()):
            yield pending
            pending = ""
    if pending:
        yield pending
