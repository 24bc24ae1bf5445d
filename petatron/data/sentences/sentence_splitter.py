"""Divides texts into sentences by rules, without a trained model: nothing is downloaded, and a text always has the same sentences.

A sentence may end at terminators (. ! ? and those of other scripts) with the closing quotes and brackets after them, if white space
follows; terminators of Chinese and Japanese need none. Whether it does is decided by the words on both sides: no sentence begins with a
small letter, and after a period an abbreviation, an initial, an ordinal or the number of a list item usually goes on. A blank line always
ends a sentence. Every pattern is possessive, so that time is linear in the text, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from petatron.data.sentences.language_rules import DEFAULT_LANGUAGE, LanguageRules, language_rules

MAX_CHARS = 1_000_000
"""A longer text is cut there before it is divided, as Megatron's tool does."""
_PERIODS = ".…"
_QUESTIONS = "!?‼⁇⁈⁉؟۔։።\u037e"
_WIDE = "。！？｡।॥"
"""Terminators without white space after them."""
_CLOSERS = "\"'”’“‘»›«‹)\\]}＂＇）］｝」』】》〉〕"
_OPENERS = "\"'“”„‚‘’«»‹›([{¿¡（［｛「『【《〈〔-–—•*"
_JAPANESE_CONTINUATIONS = "とってなはがをにもので、，,"
"""What follows a quotation within a sentence."""
_MAX_WORD_CHARS = 40
_NEXT_WORD = re.compile(rf"\S{{0,{_MAX_WORD_CHARS}}}")
_BEFORE_WORD = re.compile(rf"[\s{re.escape(_OPENERS)}]*+")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_ACRONYM = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
_ROMAN = re.compile(r"[IVXLC]{2,}")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n")


class SentenceSplitter:
    """Divides texts of a language into sentences.

    Sentences have no white space around them; with `keep_newlines` each has that which follows it, and together they are the text.

    >>> SentenceSplitter().split("Dr. Who left at 5 p.m. on Jan. 3. He said: “Why?” Nobody knew.")
    ['Dr. Who left at 5 p.m. on Jan. 3.', 'He said: “Why?”', 'Nobody knew.']
    """

    def __init__(self, language: str = DEFAULT_LANGUAGE, *, keep_newlines: bool = False) -> None:
        self._rules = rules = language_rules(language)
        self._keep_newlines = keep_newlines
        self._questions = _QUESTIONS + rules.questions
        terminators = _PERIODS + self._questions
        spaced_closer = "[ \u00a0\u202f]»" if rules is language_rules("french") else "[\u00a0\u202f]»"
        closers = f"(?:[{_CLOSERS}]|{spaced_closer})*+"
        self._candidates = re.compile(
            rf"(?P<wide>[{_WIDE}][{_WIDE}!?]*+{closers}|[!?]++{closers}(?=[\u3040-\u30ff\u3400-\u9fff]))\s*+"
            rf"|(?<![{terminators}])(?P<narrow>[{terminators}]++)(?P<closers>{closers})(?:\s++|\Z)"
            rf"|\n[^\S\n]*+\n\s*+"
        )

    def split(self, text: str) -> list[str]:
        """Returns the sentences of a text; none if it is white space."""
        parts = (text[start : start + MAX_CHARS] for start in range(0, len(text), MAX_CHARS))
        sentences = (part[start:end] for part in parts for start, end in self._spans(part))
        if self._keep_newlines:
            return list(sentences)
        return [sentence for sentence in map(str.strip, sentences) if sentence]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the place of each sentence, with the white space after it."""
        start, first_word = 0, _first_word(text, 0)
        for candidate in self._candidates.finditer(text):
            if candidate.end() < len(text) and self._ends_sentence(text, first_word, candidate):
                yield start, candidate.end()
                start = candidate.end()
                first_word = _first_word(text, start)
        if text[start:] and (self._keep_newlines or not text[start:].isspace()):
            yield start, len(text)

    def _ends_sentence(self, text: str, first_word: int, candidate: re.Match[str]) -> bool:
        """Whether a sentence whose first word is there ends at a candidate."""
        if candidate.start() < first_word:
            return False
        if candidate["wide"]:
            closed = candidate["wide"][-1] not in _WIDE
            return not (closed and text[candidate.end()] in _JAPANESE_CONTINUATIONS)
        if _BLANK_LINE.search(candidate[0]):
            return True
        word_start = _word_start(text, candidate.start())
        before = text[max(first_word, word_start) : candidate.start()].lstrip(_OPENERS)
        following = _next_word(text, candidate.end())
        first = following.lstrip(_OPENERS)[:1]
        if not first or first.islower() or not (first.isalnum() or first in "#$€£%&@"):
            return False
        if not set(candidate["narrow"]).isdisjoint(self._questions):
            return True
        if candidate["closers"].startswith("]") and text[candidate.start() - 1 : candidate.start()] == "[":
            return False  # [...] stands for what a quotation leaves out
        if len(candidate["narrow"]) > 1 or candidate["narrow"] == "…" or not before:  # an ellipsis
            return not first.isdigit()
        is_first_word = word_start <= first_word
        match = _WORD.match(following.lstrip(_OPENERS))
        next_word = match[0].lower() if match else ""
        return _period_ends_sentence(
            self._rules, before, following.lstrip(_OPENERS), next_word, is_first_word=is_first_word
        )


def _first_word(text: str, start: int) -> int:
    """Returns where the first word after a place begins."""
    match = _BEFORE_WORD.match(text, start)
    return start if match is None else match.end()


def _word_start(text: str, end: int) -> int:
    """Returns where the word before a place begins, or the farthest place where it may."""
    start = end
    while start > max(0, end - _MAX_WORD_CHARS) and not text[start - 1].isspace():
        start -= 1
    return start


def _next_word(text: str, start: int) -> str:
    """Returns the next word; a dash or a quote that stands alone is passed over."""
    match = _NEXT_WORD.match(text, start)
    word = match[0] if match else ""
    if word.strip(_OPENERS) or not word:
        return word
    following = start + len(word)
    while following < min(len(text), start + _MAX_WORD_CHARS) and text[following].isspace():
        following += 1
    match = _NEXT_WORD.match(text, following)
    return match[0] if match else ""


def _period_ends_sentence(
    rules: LanguageRules, before: str, following: str, next_word: str, *, is_first_word: bool
) -> bool:
    """Whether a sentence ends at the period after the word `before`, where no small letter follows."""
    word = before.lower()
    starts = next_word in rules.starters
    is_number = _NUMBER.fullmatch(before) is not None
    if is_first_word and (is_number or len(word) == 1):
        return False  # the number of a list item or of a heading
    is_abbreviation = word in rules.sometimes or (len(word) == 1 and word.isalpha()) or _ACRONYM.fullmatch(before)
    if following[:1].isdigit():
        known = is_abbreviation or word in rules.never or word in rules.number
        return not known and not (is_number and rules.has_ordinals)
    if word in rules.never:
        return False
    if word in rules.ends:
        return True
    if word in rules.number and _ROMAN.match(following):
        return False
    is_ordinal = rules.has_ordinals and ((is_number and len(before) <= 3) or _ROMAN.fullmatch(before))
    return starts if is_abbreviation or is_ordinal else True
