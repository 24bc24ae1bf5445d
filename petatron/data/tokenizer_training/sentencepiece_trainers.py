"""Trains BPE and unigram vocabularies of pieces, as SentencePiece has them, in which a space is the character ▁.

A word is a space and what follows it; line ends and runs of further spaces are words of their own, so that indentation has ids. No space
is put before a text: decoded, a text is what it was, if every character has an id. A character that is too rare has the ids of its bytes
with `byte_fallback`, else that of <unk>.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import PreTokenizer

from petatron.base.errors import DataError
from petatron.data.tokenizer_training.word_counts import (
    count_words,
    cover_characters,
    train_bpe_on_words,
    train_on_words,
)

UNKNOWN, BEGIN_OF_TEXT, END_OF_TEXT = SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPACE = "▁"
_WORD_PATTERN = Regex(rf"{_SPACE}+(?={_SPACE})|{_SPACE}?[^{_SPACE}\n\r\t]+|[\n\r\t]+|{_SPACE}")
_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
_NEVER_CHOSEN = -1000.0
"""The score of a byte's token in a unigram model: nobody writes a text with its name."""


def train_pieces(
    texts: Iterable[str],
    vocab_size: int,
    *,
    is_unigram: bool,
    special_tokens: Sequence[str] = (),
    byte_fallback: bool = False,
    splits_digits: bool = False,
    character_coverage: float,
) -> FastTokenizer:
    """Trains a BPE or a unigram model on texts. The first ids are those of <unk>, <s>, </s>, `special_tokens`, and bytes if used."""
    names = list(dict.fromkeys([*SPECIAL_TOKENS, *special_tokens]))
    first = list(dict.fromkeys([*names, *(BYTE_TOKENS if byte_fallback else ())]))
    normalizer, pre_tokenizer = normalizers.Replace(" ", _SPACE), _pre_tokenizer(splits_digits=splits_digits)
    room = vocab_size - len(first)
    if room < 2:
        beside = f"{len(names)} special tokens{' and 256 bytes' if byte_fallback else ''}"
        raise DataError(
            f"A vocabulary of {vocab_size} ids has no room for pieces beside {beside}. Use a larger --vocab-size."
        )
    counts = count_words(texts, normalizer, pre_tokenizer, special_tokens=names)
    covered = cover_characters(counts, coverage=character_coverage, limit=max(1, room // 2))
    # A piece with the name of a byte's token would take its id.
    known = Counter({word: n for word, n in counts.items() if covered.issuperset(word) and not _BYTE_NAME.search(word)})
    model = (_unigram if is_unigram else _bpe)(known, first, room, byte_fallback=byte_fallback)
    fast = FastTokenizer(model)
    fast.normalizer, fast.pre_tokenizer = normalizer, pre_tokenizer
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return fast


def _pre_tokenizer(*, splits_digits: bool) -> PreTokenizer:
    split = pre_tokenizers.Split(_WORD_PATTERN, "isolated")
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([split, digits]) if splits_digits else split


def _bpe(counts: Counter[str], first: Sequence[str], room: int, *, byte_fallback: bool) -> models.BPE:
    trained = json.loads(FastTokenizer(train_bpe_on_words(counts, room)).to_str())["model"]
    pieces = sorted(trained["vocab"], key=lambda piece: trained["vocab"][piece])
    vocab = {name: number for number, name in enumerate([*first, *pieces])}
    merges = [(left, right) for left, right in trained["merges"]]
    return models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=byte_fallback)


def _unigram(counts: Counter[str], first: Sequence[str], room: int, *, byte_fallback: bool) -> models.Unigram:
    fast = FastTokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=room + 1, special_tokens=[UNKNOWN], unk_token=UNKNOWN, show_progress=False
    )
    train_on_words(fast, counts, trainer)
    pieces = [(piece, score) for piece, score in json.loads(fast.to_str())["model"]["vocab"] if piece != UNKNOWN]
    reserved = [(name, _NEVER_CHOSEN if name in BYTE_TOKENS else 0.0) for name in first]
    return models.Unigram(vocab=[*reserved, *pieces], unk_id=0, byte_fallback=byte_fallback)
