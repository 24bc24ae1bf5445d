"""SentencePiece's `.model` files: a protocol buffer of pieces, the trainer spec and the normalizer spec.

Only the fields that determine ids are read. Lengths in the file are untrusted; slicing a `memoryview` bounds them. A value of the wrong
type for its field, or an implausible number of pieces, is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from petatron.base.errors import DataError
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES
from petatron.data.vocabulary_kind import SENTENCEPIECE, vocabulary_error

PieceKind = Literal["normal", "unknown", "control", "user", "unused", "byte"]
Algorithm = Literal["unigram", "bpe", "word", "char"]
_PIECE_KINDS: dict[int, PieceKind] = {1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte"}
_ALGORITHMS: dict[int, Algorithm] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MAX_PIECES = 1 << 24
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
WORD_BOUNDARY = "▁"
"""The character that replaces a space in a piece."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceModel:
    """A model's pieces by id, its tokenization algorithm (unigram, BPE), and how text is normalized before encoding.

    `bos`, `eos` and `pad` are ids, None where the model has no such piece. `has_normalization_map`: a precompiled charsmap normalizes text
    before encoding, or another denormalizes it after decoding.
    """

    path: Path
    content: bytes = field(repr=False)
    pieces: tuple[Piece, ...] = field(repr=False)
    algorithm: Algorithm
    byte_fallback: bool
    bos: int | None
    eos: int | None
    pad: int | None
    unknown_text: str
    has_normalization_map: bool
    normalization_map: bytes = field(repr=False)
    adds_dummy_prefix: bool
    removes_extra_spaces: bool
    escape_whitespaces: bool
    treat_whitespace_as_suffix: bool


def read_piece_model(path: Path) -> PieceModel:
    """Reads a `.model` file; `DataError` if it is not a SentencePiece model."""
    with reading_untrusted(path, model_error):
        content = read_limited_bytes(path, MAX_TOKENIZER_BYTES)
        return _parse_model(path, content)


def _parse_model(path: Path, content: bytes) -> PieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    denormalizer: dict[int, int | bytes] = {}
    for number, value in message_fields(memoryview(content)):
        if number == 1:
            pieces.append(_parse_piece(_message(value)))
        elif number in (2, 3, 5):
            {2: trainer, 3: normalizer, 5: denormalizer}[number].update(_message(value))
        if len(pieces) > _MAX_PIECES:
            raise ValueError(f"it has more than {_MAX_PIECES:,} pieces")
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    if not pieces or len(ids) != len(pieces):
        raise ValueError("two pieces have the same text" if pieces else "it has no pieces")
    if [piece.kind for piece in pieces].count("unknown") != 1:
        raise ValueError("it has not exactly one piece for the unknown")

    def control_id(key: int, default: str) -> int | None:
        """Looks the piece up by the name in the trainer spec, whose ids may differ from the model's."""
        number = ids.get(_text(trainer.get(key, default.encode())))
        return number if number is not None and pieces[number].kind == "control" else None

    return PieceModel(
        path=path,
        content=content,
        pieces=tuple(pieces),
        algorithm=_ALGORITHMS[_signed(trainer.get(3, 1))],
        byte_fallback=bool(trainer.get(35, 0)),
        bos=control_id(46, "<s>"),
        eos=control_id(47, "</s>"),
        pad=control_id(48, "<pad>"),
        unknown_text=_text(trainer.get(44, " \u2047 ".encode())),
        has_normalization_map=bool(normalizer.get(2, b"")) or bool(denormalizer.get(2, b"")),
        normalization_map=_bytes(normalizer.get(2, b"")),
        adds_dummy_prefix=bool(normalizer.get(3, 1)),
        removes_extra_spaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
        treat_whitespace_as_suffix=bool(trainer.get(24, 0)),
    )


def _parse_piece(fields: dict[int, int | bytes]) -> Piece:
    score = fields.get(2, b"\0\0\0\0")
    if not isinstance(score, bytes):
        raise TypeError("the score of a piece is no number")
    return Piece(_text(fields[1]), struct.unpack("<f", score)[0], _PIECE_KINDS[_signed(fields.get(3, 1))])


def _message(value: int | bytes | memoryview) -> dict[int, int | bytes]:
    """Returns the fields of a nested message: the last value of each field number."""
    if not isinstance(value, memoryview):
        raise TypeError("a number is where a message is expected")
    return {
        number: bytes(content) if isinstance(content, memoryview) else content
        for number, content in message_fields(value)
    }


def message_fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields (field number, value) of a message: varints as integers, all other wire types as their bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if wire != _BYTES and wire not in _WIDTHS:
            raise ValueError("a field has a type that does not exist")
        size, at = _varint(content, at) if wire == _BYTES else (_WIDTHS[wire], at)
        if size > len(content) - at:
            raise ValueError("it ends within a field")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """Decodes a varint (seven bits per byte, lowest first); returns its value and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than ten bytes")


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise TypeError("bytes are where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number is where a text is expected")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def model_error(path: Path, why: str) -> DataError:
    fix = "Give --tokenizer-model the .model file that its trainer wrote, or another --tokenizer-type for another file"
    return DataError(vocabulary_error(path, why, SENTENCEPIECE, fix))
