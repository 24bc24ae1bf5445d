"""Builds fill-in-the-middle prompts: the text before and after a gap, around the special tokens that a model was trained with for this.

A tokenizer names them; the formats below are those of Qwen, StarCoder, SantaCoder, DeepSeek, Code Llama and Codestral.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.base.errors import PetatronError
from petatron.data.tokenizer import Tokenizer

_FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Ids before the prefix, before the suffix, and before the answer. middle None: the suffix comes first, and the prefix last."""

    prefix: int
    suffix: int
    middle: int | None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Returns the prompt whose answer belongs between two texts.

        >>> FillInMiddle(1, 2, 3).prompt([10, 11], [12]), FillInMiddle(1, 2, None).prompt([10], [12])
        ([1, 10, 11, 2, 12, 3], [2, 12, 1, 10])
        """
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in_middle(tokenizer: Tokenizer | None) -> FillInMiddle | None:
    """Returns the tokens of a tokenizer for it; None if it has none of these."""
    if tokenizer is None:
        return None
    for names in _FORMATS:
        ids = [_single_id(name, tokenizer) for name in names]
        if None not in ids and len(set(ids)) == len(ids):
            prefix, suffix, middle = ids
            assert prefix is not None and suffix is not None
            return FillInMiddle(prefix, suffix, middle)
    prefix, suffix = (_single_id(name, tokenizer) for name in _SUFFIX_FIRST)
    return None if prefix is None or suffix is None or prefix == suffix else FillInMiddle(prefix, suffix, None)


def _single_id(token: str, tokenizer: Tokenizer) -> int | None:
    """Returns the id of a token of the vocabulary; None if the text is several, or another one."""
    try:
        ids = tokenizer.encode(token)
    except PetatronError:  # a tokenizer of numbers alone
        return None
    return ids[0] if len(ids) == 1 and _without_spaces(tokenizer.decode(ids)) == _without_spaces(token) else None


def _without_spaces(text: str) -> str:
    return text.replace("▁", "").replace(" ", "")
