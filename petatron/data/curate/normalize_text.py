"""Normalized text: what makes two texts the same, and the words of which n-grams are made.

Deduplication and decontamination compare words, not bytes: runs of characters and digits in lower case, without punctuation. Scripts
that are written without spaces have a word for each character.
"""

from __future__ import annotations

import re
import unicodedata

_ASCII_WORDS = bytes(
    byte if byte >= 128 else ord(chr(byte).lower()) if chr(byte).isalnum() else 32 for byte in range(256)
)
"""Lower case, and a space for everything that is in no word."""
# Combining marks belong to words, though Python does not count them as word characters: accents, Hebrew and Arabic points, the vowel
# signs of Indic scripts (without their full stops), Thai, Lao, Tibetan, Burmese and Khmer.
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0fff\u1000-\u109f\u1780-\u17ff"
_NO_WORD = re.compile(rf"[^\w\x00-\x7f{_MARKS}]+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai and Lao, Burmese, Khmer, Japanese, Chinese."""


def same_text_key(text: str) -> str:
    """Returns the form in which texts are equal: composed characters, lower case, one space for any blank space.

    >>> same_text_key("  Two\\n\\n  Lines ")
    'two lines'
    """
    return " ".join(_composed(text).lower().split())


def word_bytes(text: str) -> bytes:
    """Returns the words of a text as UTF-8 with spaces between, one or several.

    >>> word_bytes("Don't panic: 42\\u2014times!").split()
    [b'don', b't', b'panic', b'42', b'times']
    >>> word_bytes("\\u4f60\\u597d").decode().split()
    ['你', '好']
    """
    if not text.isascii():
        text = _NO_WORD.sub(" ", _composed(text).lower())
        text = _UNSPACED.sub(r" \g<0> ", text)
    return text.encode("utf-8", "surrogatepass").translate(_ASCII_WORDS)


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)
