"""Encodes text as SentencePiece ids: with the tokenizers library where that is exact, else with the sentencepiece library (an extra)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.sentencepiece_model.exact_bpe import build_exact_bpe, inexact_reason
from petatron.data.sentencepiece_model.model_file import PieceModel, model_error

_SPACE_MARK = "☯"
"""The sentinel that Megatron puts between spaces that a model would collapse: a character that no vocabulary has."""
_JOINED_SPACES = re.compile(r"(?<= )(?= )|^ | $")


class PieceEncoder(Protocol):
    """Encodes texts as a model's pieces."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


def build_piece_encoder(model: PieceModel, *, keep_extra_spaces: bool) -> PieceEncoder:
    """Returns the encoder of a model. With `keep_extra_spaces`, consecutive spaces, which the model collapses, are preserved."""
    if inexact_reason(model) is None:
        return ExactBpeEncoder(model)
    encoder = SentencePieceLibraryEncoder(model)
    return _SpaceKeepingEncoder(encoder) if keep_extra_spaces and model.removes_extra_spaces else encoder


class ExactBpeEncoder:
    """Encodes with the tokenizers library."""

    def __init__(self, model: PieceModel) -> None:
        self.fast = build_exact_bpe(model)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]


class SentencePieceLibraryEncoder:
    """Encodes with the sentencepiece library; `DataError` with the command that installs it if it is not installed."""

    def __init__(self, model: PieceModel) -> None:
        self._library = _open_library(model)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._library.encode(text) for text in texts]


class _SpaceKeepingEncoder:
    """Splits text at a sentinel character; encodes each part with it and drops the sentinel's id, as Megatron does."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        marked = _JOINED_SPACES.sub(f" {_SPACE_MARK} ", text).rstrip()
        parts = [part + _SPACE_MARK for part in marked.split(_SPACE_MARK) if part]
        return [number for ids in self._encoder.encode_batch(parts) for number in ids[:-1]]


def _open_library(model: PieceModel) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise DataError(
            f"A SentencePiece model with {inexact_reason(model)} needs the sentencepiece library, which is not installed: "
            "pip install 'petatron[tokenizers]'."
        ) from error
    with reading_untrusted(model.path, model_error):
        return SentencePieceProcessor(model_proto=model.content)
