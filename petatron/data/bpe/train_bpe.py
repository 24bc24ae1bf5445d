"""Trains a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.data.tokenizer import END_OF_TEXT, HuggingFaceTokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, out_path: str | Path) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE on the texts, writes it as a tokenizer.json and returns it. Id 0 is <|endoftext|>."""
    fast = train_byte_level_bpe(texts, vocab_size)
    try:
        Path(out_path).parent.mkdir(parents=True, exist_ok=True)
        Path(out_path).write_text(fast.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write the tokenizer to {out_path}: {error}. Choose a writable folder.") from error
    return HuggingFaceTokenizer(out_path)


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = (), splits_digits: bool = False
) -> FastTokenizer:
    """Trains a byte-level BPE, which has ids for any text. The first ids are <|endoftext|> and `special_tokens`.

    splits_digits: every digit is a word, so that numbers have an id for each.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(dict.fromkeys([END_OF_TEXT, *special_tokens]))
    others = len(alphabet) + len(names) - 1
    if vocab_size <= others:
        beside = f"{len(names)} special tokens" if special_tokens else "the end of text"
        raise DataError(f"A byte-level BPE needs more than {others} ids (all bytes and {beside}), not {vocab_size}.")
    fast = FastTokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    fast.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if splits_digits else byte_level
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    return fast
