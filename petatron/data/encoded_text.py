"""`EncodedText`: the token ids of a text with the span of characters of each token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
"""The first character, and the one after the last, counted as Python counts them."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The ids of a text, and the span of characters of each, in the order of the text.

    Spans are those of the library that a tokenizer comes from. Where a character is several tokens, each has its span; SentencePiece gives
    it to the last, and the others have an empty one before it. A token that stands for no character of the text, as a space that a
    tokenizer puts before it, has an empty span or that of the character after it. A character that a tokenizer leaves out is in no span.
    """

    ids: list[int]
    spans: list[Span]


def byte_spans(text: str, spans: list[Span]) -> list[Span]:
    """Returns spans of characters as spans of the bytes of UTF-8.

    >>> byte_spans("né!", [(0, 1), (1, 2), (1, 2), (2, 3)])
    [(0, 1), (1, 3), (1, 3), (3, 4)]
    """
    if text.isascii():
        return spans
    ends = [0]
    for char in text:
        ends.append(ends[-1] + len(char.encode("utf-8", "surrogatepass")))
    return [(ends[start], ends[stop]) for start, stop in spans]


def character_places(text: str) -> dict[int, int]:
    """Returns which character begins at each byte of UTF-8 where one does, and after the last.

    >>> character_places("né!")
    {0: 0, 1: 1, 3: 2, 4: 3}
    """
    content = text.encode()
    starts = [place for place, byte in enumerate(content) if byte & 0xC0 != 0x80]
    return {place: number for number, place in enumerate([*starts, len(content)])}


def utf8_spans(text: str) -> list[Span]:
    """Returns the spans of the bytes of a text, of which each is a token.

    >>> utf8_spans("né")
    [(0, 1), (1, 2), (1, 2)]
    """
    lengths = (stop - start for start, stop in pairwise(character_places(text)))
    return [(number, number + 1) for number, length in enumerate(lengths) for _ in range(length)]
