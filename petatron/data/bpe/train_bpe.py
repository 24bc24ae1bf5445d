"""Trains a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from petatron.base.errors import DataError
from petatron.data.tokenizer import END_OF_TEXT, HuggingFaceTokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, out_path: str | Path) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE on the texts, writes it as a tokenizer.json and returns it. Id 0 is <|endoftext|>."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"A byte-level BPE needs more than {len(alphabet)} ids (all bytes and the end of text), not {vocab_size}."
        )
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(texts, trainer)
    try:
        Path(out_path).parent.mkdir(parents=True, exist_ok=True)
        Path(out_path).write_text(fast.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write the tokenizer to {out_path}: {error}. Choose a writable folder.") from error
    return HuggingFaceTokenizer(out_path)
