"""Decodes SentencePiece ids to text, as its library does."""

from __future__ import annotations

from collections.abc import Sequence

from petatron.data.sentencepiece_model.model_file import WORD_BOUNDARY, Piece, PieceModel

_LONE_BYTES = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")


class PieceDecoder:
    """Joins pieces: control pieces decode to the empty string, byte pieces to bytes, and the dummy prefix is removed."""

    def __init__(self, model: PieceModel) -> None:
        self._pieces, self._unknown_text = model.pieces, model.unknown_text
        self._strips_all = model.removes_extra_spaces
        self._strips = model.adds_dummy_prefix or model.removes_extra_spaces

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; ids after the last piece (vocabulary padding) decode to the empty string."""
        texts: list[str] = []
        run = bytearray()
        at_start = self._strips
        for number in ids:
            if not 0 <= number < len(self._pieces):
                continue
            piece = self._pieces[number]
            if piece.kind == "byte":
                run.append(int(piece.text[3:5], 16))
                continue
            if run:
                texts.append(_text_of_bytes(run))
                run, at_start = bytearray(), False
            text, at_start = self._text_of(piece, at_start)
            texts.append(text)
        return "".join(texts) + _text_of_bytes(run)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of the text, those that are no UTF-8 as they are."""
        content = bytearray()
        at_start = self._strips
        for number in ids:
            if not 0 <= number < len(self._pieces):
                continue
            piece = self._pieces[number]
            if piece.kind == "byte":
                content.append(int(piece.text[3:5], 16))
                at_start = False
                continue
            text, at_start = self._text_of(piece, at_start)
            content += text.encode()
        return bytes(content)

    def _text_of(self, piece: Piece, at_start: bool) -> tuple[str, bool]:
        """Returns the text of a piece that is no byte, and whether what follows still begins the text."""
        text = "" if piece.kind == "control" else self._unknown_text if piece.kind == "unknown" else piece.text
        if piece.kind not in ("control", "unknown"):
            stripped = text.removeprefix(WORD_BOUNDARY) if at_start else text
            at_start &= self._strips_all or stripped == text
            text = stripped.replace(WORD_BOUNDARY, " ")
        return text, at_start and not text


def _text_of_bytes(run: bytearray) -> str:
    """Decodes UTF-8 with one U+FFFD per invalid byte; Python emits one per invalid sequence."""
    return run.decode(errors="surrogateescape").translate(_LONE_BYTES)
