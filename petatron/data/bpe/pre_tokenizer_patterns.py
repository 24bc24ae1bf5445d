"""The pre-tokenization patterns of byte-level BPE, which divide a text into words before bytes are merged, as tokenizer files have them.

In all of them a word begins at any space that follows something else than white space, and a word by itself is divided as it is in a text.
"""

from __future__ import annotations

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_CONTRACTIONS})"
_SPELLED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r" ?[^\s\p{L}\p{N}]+"
_WHITE_SPACE = r"\s+(?!\S)|\s+"
_NUMBERS = (r"\p{N}{1,3}", r"\p{N}")

GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+|{_OTHERS}|{_WHITE_SPACE}"
GPT2_DIGITS = rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}|{_OTHERS}|\s+(?![^\s\p{{N}}])|\s+"
"""GPT-2's, where every digit has been cut out before: white space ends at one."""


def _with_line_ends(contractions: str, numbers: str) -> str:
    return rf"{contractions}|{_BEFORE_WORD}?\p{{L}}+|{numbers}|{_OTHERS}[\r\n]*|\s*[\r\n]+|{_WHITE_SPACE}"


def _with_case(contractions: str, numbers: str) -> str:
    cased = f"{_BEFORE_WORD}?{_UPPER}*{_LOWER}+{contractions}|{_BEFORE_WORD}?{_UPPER}+{_LOWER}*{contractions}"
    return rf"{cased}|{numbers}|{_OTHERS}[\r\n/]*|\s*[\r\n]+|{_WHITE_SPACE}"


TIKTOKENIZER_PATTERNS = {
    "v1": rf"{_BEFORE_WORD}?+\p{{L}}+|\p{{N}}|{_OTHERS}+[\r\n]*|\s*[\r\n]|{_WHITE_SPACE}",
    "v2": _with_case("", r"\p{N}"),
}
"""Megatron's `--tiktoken-pattern`: a word with at most one character before it, a digit, punctuation, or spaces. v2 also splits before
an uppercase letter that follows lowercase ones."""
GPT4_PATTERNS = frozenset(
    _with_line_ends(endings, numbers) for endings in (_ANY_CASE, _SPELLED) for numbers in _NUMBERS
)
"""GPT-4's, and those of Llama 3 and Qwen."""
GPT4O_PATTERNS = frozenset(
    _with_case(f"{endings}?", numbers) for endings in (_ANY_CASE, _SPELLED) for numbers in _NUMBERS
)
"""GPT-4o's, and that of Llama 4: a capital begins a word."""
QWEN35 = rf"{_ANY_CASE}|{_BEFORE_WORD}?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_WHITE_SPACE}"
"""Qwen 3.5's: marks are part of a word."""
SPLIT_PATTERNS = frozenset([GPT2, *GPT4_PATTERNS, *GPT4O_PATTERNS, QWEN35, *TIKTOKENIZER_PATTERNS.values()])
