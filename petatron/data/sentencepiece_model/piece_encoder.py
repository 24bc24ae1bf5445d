"""Encodes text as SentencePiece ids: with the tokenizers library where that is exact, else with the sentencepiece library (an extra)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.encoded_text import EncodedText, Span, character_places
from petatron.data.sentencepiece_model.exact_bpe import build_exact_bpe, inexact_reason
from petatron.data.sentencepiece_model.model_file import WORD_BOUNDARY, PieceModel, message_fields, model_error

_SPACE_MARK = "☯"
"""The sentinel that Megatron puts between spaces that a model would collapse: a character that no vocabulary has."""
_MARKED = f" {_SPACE_MARK} "
_JOINED_SPACES = re.compile(r"(?<= )(?= )|^ | $")

_PIECES_FIELD, _ID_FIELD, _BEGIN_FIELD, _END_FIELD = 2, 2, 4, 5
"""Fields of the library's SentencePieceText, whose begin and end count bytes: the pieces; of each its id, begin and end."""


class PieceEncoder(Protocol):
    """Encodes texts as a model's pieces."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns the spans that the sentencepiece library gives."""
        ...


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
        self._pieces, self._adds_prefix = model.pieces, model.adds_dummy_prefix

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns ids and spans; the tokenizers library gives a lone prefix, and every byte of a character, the whole character."""
        encoding = self.fast.encode(text, add_special_tokens=False)
        ids, spans = encoding.ids, list(encoding.offsets)
        for place in range(len(ids) - 1):
            (start, _), is_byte = spans[place], self._pieces[ids[place]].kind == "byte"
            if is_byte and spans[place] == spans[place + 1] and self._pieces[ids[place + 1]].kind == "byte":
                spans[place] = start, start
        if ids and self._adds_prefix and self._pieces[ids[0]].text == WORD_BOUNDARY:
            spans[0] = 0, 0
        return EncodedText(ids, spans)


class SentencePieceLibraryEncoder:
    """Encodes with the sentencepiece library; `DataError` with the command that installs it if it is not installed."""

    def __init__(self, model: PieceModel) -> None:
        self._library = _open_library(model)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._library.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> EncodedText:
        fields = message_fields(memoryview(self._library.encode(text, out_type="serialized_proto")))
        places = character_places(text)
        encoded = EncodedText([], [])
        for number, value in fields:
            if number == _PIECES_FIELD and isinstance(value, memoryview):
                piece = {key: field for key, field in message_fields(value) if isinstance(field, int)}
                encoded.ids.append(piece[_ID_FIELD])
                encoded.spans.append((places[piece.get(_BEGIN_FIELD, 0)], places[piece.get(_END_FIELD, 0)]))
        return encoded


class _SpaceKeepingEncoder:
    """Splits text at a sentinel character; encodes each part with it and drops the sentinel's id, as Megatron does."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        return [number for ids in self._encoder.encode_batch(_marked_parts(text)) for number in ids[:-1]]

    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns ids and spans; the spaces around a sentinel are no characters of the text."""
        origins = _unmarked_spans(text)
        ids: list[int] = []
        spans: list[Span] = []
        before = 0
        for part in _marked_parts(text):
            encoded = self._encoder.encode_with_offsets(part)
            ids += encoded.ids[:-1]
            for first, last in encoded.spans[:-1]:
                start = origins[before + first][0]
                spans.append((start, origins[before + last - 1][1] if last > first else start))
            before += len(part) - len(_SPACE_MARK)
        return EncodedText(ids, spans)


def _unmarked_spans(text: str) -> list[Span]:
    """Returns where each character of the marked text that is no sentinel comes from, and the end of the text."""
    spans: list[Span] = []
    end = 0
    for match in _JOINED_SPACES.finditer(text):
        spans += _own_spans(text, end, match.start())
        end = match.end()
        spans += [match.span(), (end, end)]
    return [*spans, *_own_spans(text, end, len(text)), (len(text), len(text))]


def _own_spans(text: str, start: int, stop: int) -> list[Span]:
    return [(place, place + 1) for place in range(start, stop) if text[place] != _SPACE_MARK]


def _marked_parts(text: str) -> list[str]:
    """Returns the parts of a text with the sentinel at the end of each."""
    marked = _JOINED_SPACES.sub(_MARKED, text).rstrip()
    return [part + _SPACE_MARK for part in marked.split(_SPACE_MARK) if part]


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
