"""Divides texts into words by the rules of BERT's tokenizer in Python, with the Unicode tables of Python.

The rules of the tokenizers library are the same up to rare characters. It knows an older Unicode, and so takes newer punctuation and
unassigned code points for letters, where Python splits at the first and drops the second; it lowercases letter by letter (a final sigma
is not special); and it does not compose characters (NFC), which matters where accents stay.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_IDEOGRAPHS = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F)),
)
"""The blocks whose characters are words by themselves; BERT's list, which newer blocks have not joined."""
_REPLACEMENT = 0xFFFD


class _CleanedCharacters(dict[int, str]):
    """What each character of a text becomes before words are divided: nothing, a space, itself between spaces, or itself."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in "\t\n\r" or unicodedata.category(char) == "Zs":
            text = " "
        elif code in (0, _REPLACEMENT) or unicodedata.category(char).startswith("C"):
            text = ""
        elif any(first <= code <= last for first, last in _IDEOGRAPHS):
            text = f" {char} "
        else:
            text = char
        self[code] = text
        return text


class _SplitCharacters(dict[int, str]):
    """What each character of a word becomes: punctuation is a word by itself, and accents are dropped if they are stripped."""

    def __init__(self, *, drops_accents: bool) -> None:
        self._drops_accents = drops_accents

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        is_symbol = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
        if self._drops_accents and category == "Mn":
            text = ""
        elif is_symbol or category.startswith("P"):
            text = f" {char} "
        else:
            text = char
        self[code] = text
        return text


class WordSplitter:
    """Divides texts into words; those that are a special token stay as they are."""

    def __init__(self, special_tokens: Sequence[str], *, lowercase: bool) -> None:
        self._lowercase = lowercase
        self._special_tokens = frozenset(special_tokens)
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._cleaned, self._divided = _CleanedCharacters(), _SplitCharacters(drops_accents=lowercase)

    def split(self, text: str) -> list[str]:
        """Returns the words of a text.

        >>> WordSplitter(["[MASK]"], lowercase=True).split("Ça va? 東京 [MASK]")
        ['ca', 'va', '?', '東', '京', '[MASK]']
        """
        divided: list[str] = []
        for part in self._pattern.split(text):
            divided += [part] if part in self._special_tokens else self._split_plain(part)
        return divided

    def _split_plain(self, text: str) -> list[str]:
        composed = unicodedata.normalize("NFC", text.translate(self._cleaned))
        if self._special_tokens.isdisjoint(composed.split()):
            return self._split_composed(composed)
        # The characters that cleaning drops may have hidden the name of a special token.
        divided: list[str] = []
        for word in composed.split():
            divided += [word] if word in self._special_tokens else self._split_composed(word)
        return divided

    def _split_composed(self, text: str) -> list[str]:
        if self._lowercase:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._divided).split()
