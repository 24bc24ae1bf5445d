"""The quality and repetition rules of Gopher (Rae et al. 2021, section A1.1), for English: words, lines, stop words, n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from petatron.data.curate.filter.repetition import (
    duplicate_character_share,
    duplicate_ngram_share,
    duplicate_share,
    top_ngram_share,
)
from petatron.data.curate.filter.rule import Rule
from petatron.data.curate.filter.text_view import TextView

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
ELLIPSES = ("...", "\u2026")
_BULLETS = tuple("\u2022\u2023\u25b6\u25c0\u25e6\u25a0\u25a1\u25aa\u25ab\u25cf\u25cb\u2013-*")


def num_words(view: TextView) -> float:
    return len(view.words_lower)


def mean_word_length(view: TextView) -> float:
    """Returns the mean number of characters of a word; 0 without words."""
    return fmean(map(len, view.words_lower)) if view.words_lower else 0.0


def symbol_ratio(view: TextView, symbols: Sequence[str]) -> float:
    """Returns the number of symbols for each token."""
    return sum(view.text.count(symbol) for symbol in symbols) / max(len(view.tokens), 1)


def bullet_line_share(view: TextView) -> float:
    return _share(view.lines, [line.startswith(_BULLETS) for line in view.lines])


def ellipsis_line_share(view: TextView) -> float:
    return _share(view.lines, [line.endswith(ELLIPSES) for line in view.lines])


def alphabetic_token_share(view: TextView) -> float:
    """Returns the share of tokens with a character of an alphabet."""
    return _share(view.tokens, [any(map(str.isalpha, token)) for token in view.tokens])


def num_stop_words(view: TextView, stop_words: Sequence[str]) -> float:
    """Returns how many of the stop words occur."""
    return len(set(stop_words).intersection(view.words_lower))


def _share(parts: Sequence[str], chosen: Sequence[bool]) -> float:
    return sum(chosen) / len(parts) if parts else 0.0


def gopher_rules(stop_words: Sequence[str] = STOP_WORDS) -> tuple[Rule, ...]:
    """Returns the rules with the bounds of the paper, the cheap ones first."""
    quality = (
        Rule("gopher_few_words", num_words, least=50),
        Rule("gopher_many_words", num_words, most=100_000),
        Rule("gopher_short_words", mean_word_length, least=3),
        Rule("gopher_long_words", mean_word_length, most=10),
        Rule("gopher_hashes", partial(symbol_ratio, symbols=("#",)), most=0.1),
        Rule("gopher_ellipses", partial(symbol_ratio, symbols=ELLIPSES), most=0.1),
        Rule("gopher_bullet_lines", bullet_line_share, most=0.9),
        Rule("gopher_ellipsis_lines", ellipsis_line_share, most=0.3),
        Rule("gopher_alphabetic_words", alphabetic_token_share, least=0.8),
        Rule("gopher_stop_words", partial(num_stop_words, stop_words=stop_words), least=2),
    )
    repetition = (
        Rule("gopher_duplicate_lines", lambda view: duplicate_share(view.lines), most=0.3),
        Rule("gopher_duplicate_paragraphs", lambda view: duplicate_share(view.paragraphs), most=0.3),
        Rule("gopher_duplicate_line_characters", lambda view: duplicate_character_share(view.lines), most=0.2),
        Rule(
            "gopher_duplicate_paragraph_characters",
            lambda view: duplicate_character_share(view.paragraphs),
            most=0.2,
        ),
        *(Rule(f"gopher_top_{n}_gram", partial(_top_ngram, n=n), most=most) for n, most in _TOP),
        *(Rule(f"gopher_duplicate_{n}_grams", partial(_duplicate_ngrams, n=n), most=most) for n, most in _DUPLICATE),
    )
    return quality + repetition


_TOP = ((2, 0.20), (3, 0.18), (4, 0.16))
_DUPLICATE = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))


def _top_ngram(view: TextView, n: int) -> float:
    return top_ngram_share(view.numbered_words, n)


def _duplicate_ngrams(view: TextView, n: int) -> float:
    return duplicate_ngram_share(view.numbered_words, n)
