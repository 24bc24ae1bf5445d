"""Trains a tokenizer on texts and returns its files, which our own tokenizers and transformers open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.safe_files import make_folder, write_atomic
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.bpe.train_bpe import train_byte_level_bpe
from petatron.data.tokenizer import END_OF_TEXT
from petatron.data.tokenizer_training import sentencepiece_trainers
from petatron.data.tokenizer_training.sentencepiece_trainers import train_pieces
from petatron.data.tokenizer_training.wordpiece_trainer import train_word_pieces
from petatron.data.tokenizers_library import tokenizer_config
from petatron.data.wordpiece_tokenizer import VOCABULARY_FILE, WordPieceOptions, WordPieceTokenizer

TokenizerAlgorithm = Literal["bpe", "wordpiece", "unigram"]
ALGORITHMS: tuple[TokenizerAlgorithm, ...] = get_args(TokenizerAlgorithm)
DEFAULT_COVERAGE = 0.9995
_SLICE_CHARS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerTraining:
    """What to train.

    algorithm: bpe is byte-level BPE (GPT-2); with `byte_fallback` it is SentencePiece's BPE, whose vocabulary also has a token for
    each of the 256 bytes (Llama 2). splits_digits: every digit is a word. special_tokens: in addition to the algorithm's own. lowercase: of
    WordPiece. character_coverage: the share of the text whose characters have ids of their own; byte-level BPE needs none.
    """

    algorithm: TokenizerAlgorithm = "bpe"
    vocab_size: int = 32_000
    byte_fallback: bool = False
    splits_digits: bool = False
    special_tokens: tuple[str, ...] = ()
    lowercase: bool = False
    character_coverage: float = DEFAULT_COVERAGE

    @property
    def is_byte_level(self) -> bool:
        return self.algorithm == "bpe" and not self.byte_fallback


def train_tokenizer(texts: Iterable[str], training: TokenizerTraining, folder: Path) -> None:
    """Trains a tokenizer and writes its files into a folder."""
    texts = _slices(texts)
    with reading_untrusted(folder, lambda _, why: _training_error(training, why)):
        if training.algorithm == "wordpiece":
            _write_word_pieces(texts, training, folder)
            return
        fast, end, unknown = _train_library(texts, training)
        _write(
            folder,
            {**tokenizer_config({"eos_token": end, "unk_token": unknown}), "tokenizer.json": fast.to_str().encode()},
        )


def _slices(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts in slices: the library takes many times the memory of a text. A cut may divide a word now and then."""
    for text in texts:
        for start in range(0, len(text), _SLICE_CHARS):
            yield text[start : start + _SLICE_CHARS]


def _train_library(texts: Iterable[str], training: TokenizerTraining) -> tuple[FastTokenizer, str, str | None]:
    """Returns a tokenizer of the library, and its tokens of the end of a text and of what is unknown."""
    if training.is_byte_level:
        fast = train_byte_level_bpe(
            texts, training.vocab_size, special_tokens=training.special_tokens, splits_digits=training.splits_digits
        )
        return fast, END_OF_TEXT, None
    fast = train_pieces(
        texts,
        training.vocab_size,
        is_unigram=training.algorithm == "unigram",
        special_tokens=training.special_tokens,
        byte_fallback=training.byte_fallback,
        splits_digits=training.splits_digits,
        character_coverage=training.character_coverage,
    )
    return fast, sentencepiece_trainers.END_OF_TEXT, sentencepiece_trainers.UNKNOWN


def _write_word_pieces(texts: Iterable[str], training: TokenizerTraining, folder: Path) -> None:
    tokens = train_word_pieces(
        texts,
        training.vocab_size,
        lowercase=training.lowercase,
        special_tokens=training.special_tokens,
        character_coverage=training.character_coverage,
    )
    _write(folder, {VOCABULARY_FILE: "".join(f"{token}\n" for token in tokens).encode()})
    options = WordPieceOptions(lowercase=training.lowercase, special_tokens=training.special_tokens)
    _write(folder, WordPieceTokenizer(folder / VOCABULARY_FILE, options).files())


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Writes the files of a tokenizer in place of those of another one."""
    try:
        make_folder(folder)
        for name in (VOCABULARY_FILE, "tokenizer.json", "tokenizer_config.json"):
            if name not in files:
                (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_atomic(folder / name, content)
    except OSError as error:
        raise DataError(f"Cannot write the tokenizer to {folder}: {error}. Choose a writable folder.") from error


def _training_error(training: TokenizerTraining, why: str) -> DataError:
    return DataError(
        f"The {training.algorithm} tokenizer of {training.vocab_size:,} ids was not trained: the answer of the library {why}. Give it more "
        "text, or another --vocab-size."
    )
