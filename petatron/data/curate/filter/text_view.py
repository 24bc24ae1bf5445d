"""`TextView`: the words, lines and paragraphs of a text that filter rules measure, each split once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from petatron.data.curate.filter.repetition import NumberedTokens
from petatron.data.curate.language.language_identification import language_shares

_PARAGRAPH_BREAK = re.compile(r"\n[^\S\n]*\n\s*")
_PUNCTUATION_AT_ENDS = re.compile(r"^[\W_]+|[\W_]+$")


class TextView:
    """Tokens are divided by blank space; words are tokens without punctuation at their ends.

    >>> view = TextView("The cat -- it's here.\\n\\n* The end...")
    >>> view.words_lower
    ['the', 'cat', "it's", 'here', 'the', 'end']
    >>> view.lines, len(view.paragraphs)
    (["The cat -- it's here.", '* The end...'], 2)
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def tokens(self) -> list[str]:
        return self.text.split()

    @cached_property
    def words_lower(self) -> list[str]:
        """Words in lower case."""
        stripped = (
            token if token[0].isalnum() and token[-1].isalnum() else _PUNCTUATION_AT_ENDS.sub("", token)
            for token in self.text.lower().split()
        )
        return [token for token in stripped if token]

    @cached_property
    def numbered_words(self) -> NumberedTokens:
        """Words in lower case, as numbers."""
        return NumberedTokens.of(self.words_lower)

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, without blank space at their ends."""
        return [line for part in self.text.split("\n") if (line := part.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What blank lines divide."""
        return [part for piece in _PARAGRAPH_BREAK.split(self.text) if (part := piece.strip())]

    @cached_property
    def language_shares(self) -> Mapping[str, float]:
        """The share of the text in each language."""
        return language_shares(self.text)
