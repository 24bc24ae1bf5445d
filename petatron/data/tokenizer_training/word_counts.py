"""Words of a text and how often each occurs, for trainers that need no more of it, and the characters that are worth an id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

SEPARATOR = "\0"
"""Between the words that a trainer is given; no word contains it."""
_MAX_WORD_CHARS = 100
_FEED_CHARS = 1 << 16


def count_words(
    texts: Iterable[str], normalizer: Normalizer, pre_tokenizer: PreTokenizer, *, special_tokens: Sequence[str]
) -> Counter[str]:
    """Counts the words of texts between special tokens; overlong ones, which no piece should come from, are left out."""
    counts: Counter[str] = Counter()
    longest_first = sorted(special_tokens, key=len, reverse=True)
    names = re.compile("|".join(map(re.escape, longest_first)))
    for text in texts:
        for part in names.split(text):
            counts.update(word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(part)))
    return Counter({word: n for word, n in counts.items() if len(word) <= _MAX_WORD_CHARS and SEPARATOR not in word})


def cover_characters(counts: Mapping[str, int], *, coverage: float, limit: int) -> frozenset[str]:
    """Returns the most frequent characters, at most `limit`, that make up a share of the text; ties go by code point.

    >>> sorted(cover_characters({"aab": 10, "c": 1}, coverage=0.9, limit=5))
    ['a', 'b']
    """
    characters: Counter[str] = Counter()
    for word, n in counts.items():
        for char in word:
            characters[char] += n
    wanted = coverage * characters.total()
    covered: list[str] = []
    seen = 0
    for char, n in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if seen >= wanted or len(covered) >= limit:
            break
        covered.append(char)
        seen += n
    return frozenset(covered)


def train_on_words(fast: FastTokenizer, counts: Mapping[str, int], trainer: object) -> None:
    """Trains the model of a tokenizer on words with their counts, in the order of the words."""
    fast.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(SEPARATOR)
    fast.train_from_iterator(_fed_texts(counts), trainer)  # type: ignore[arg-type]


def _fed_texts(counts: Mapping[str, int]) -> Iterator[str]:
    """Yields texts in which each word occurs as often as it is counted, of bounded length."""
    for word in sorted(counts):
        left = counts[word]
        at_once = max(1, _FEED_CHARS // (len(word) + 1))
        while left > 0:
            yield (word + SEPARATOR) * min(left, at_once)
            left -= at_once


def train_bpe_on_words(
    counts: Mapping[str, int], vocab_size: int, *, min_frequency: int = 0, alphabet: Sequence[str] = ()
) -> models.BPE:
    """Returns the BPE of words: their characters and the alphabet in the order of code points, then merges."""
    fast = FastTokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, initial_alphabet=list(alphabet), show_progress=False
    )
    train_on_words(fast, counts, trainer)
    return fast.model  # type: ignore[return-value]
