"""Trains the vocabulary of a WordPiece tokenizer: the pieces of a BPE of BERT's words.

A piece that does not begin a word is written with ## in front. The library's own trainer numbers such characters in the order of a hash
table, so that two runs give two vocabularies. Here each character that does not begin a word is another one, of the private planes of
Unicode, while a plain BPE is trained, which is the same whenever it runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers, pre_tokenizers

from petatron.base.errors import DataError
from petatron.data.tokenizer_training.word_counts import count_words, cover_characters, train_bpe_on_words
from petatron.data.wordpiece.vocabulary_file import CLASSIFIER, MASK, PADDING, SEPARATOR, UNKNOWN

_PREFIX = "##"
_FIRST_PRIVATE = 0xF0000
_MIN_FREQUENCY = 2
"""How often a pair occurs at least that becomes a piece."""


def train_word_pieces(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool,
    special_tokens: Sequence[str] = (),
    character_coverage: float,
) -> list[str]:
    """Returns the tokens of a vocab.txt: BERT's special tokens, further ones, characters and pieces."""
    names = list(dict.fromkeys([PADDING, UNKNOWN, CLASSIFIER, SEPARATOR, MASK, *special_tokens]))
    room = vocab_size - len(names)
    if room < 2:
        raise DataError(
            f"A vocabulary of {vocab_size} ids has no room for pieces beside {len(names)} special tokens. Use a larger --vocab-size."
        )
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    counts = count_words(texts, normalizer, pre_tokenizer, special_tokens=names)
    counts = Counter({word: n for word, n in counts.items() if ord(max(word)) < _FIRST_PRIVATE})
    # A character may take two ids: at the beginning of words, and elsewhere.
    covered = sorted(cover_characters(counts, coverage=character_coverage, limit=max(1, room // 3)))
    inner = {char: chr(_FIRST_PRIVATE + number) for number, char in enumerate(covered)}
    marked = {
        word[0] + "".join(inner[char] for char in word[1:]): n
        for word, n in counts.items()
        if inner.keys() >= set(word)
    }
    model = train_bpe_on_words(marked, room, min_frequency=_MIN_FREQUENCY, alphabet=covered)
    vocab = json.loads(FastTokenizer(model).to_str())["model"]["vocab"]
    plain = {ord(mark): char for char, mark in inner.items()}
    pieces = [
        (_PREFIX if ord(piece[0]) >= _FIRST_PRIVATE else "") + piece.translate(plain)
        for piece in sorted(vocab, key=lambda piece: vocab[piece])
    ]
    return list(dict.fromkeys([*names, *pieces]))
