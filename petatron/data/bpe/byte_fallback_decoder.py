"""The bytes of ids whose vocabulary has pieces of text, and `<0x..>` for the bytes of what has none, as Llama's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Self

from tokenizers import Tokenizer as FastTokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
_STEPS = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP_PREFIX = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class ByteFallbackDecoder:
    """Joins the bytes of pieces, without the space before the first if the tokenizer put one there."""

    def __init__(self, fast: FastTokenizer, *, strips_prefix: bool) -> None:
        self._fast, self._strips_prefix = fast, strips_prefix

    @classmethod
    def of(cls, fast: FastTokenizer) -> Self | None:
        """Returns the decoder of a tokenizer whose own makes a text of such pieces; None for another."""
        if fast.decoder is None:
            return None
        state = json.loads(fast.decoder.__getstate__())
        steps = state.get("decoders")
        if steps not in (_STEPS, [*_STEPS, _STRIP_PREFIX]):
            return None
        return cls(fast, strips_prefix=steps != _STEPS)

    def decode(self, ids: Sequence[int]) -> bytes:
        pieces = (self._fast.id_to_token(int(number)) or "" for number in ids)
        content = b"".join(map(_bytes_of_piece, pieces))
        return content.removeprefix(b" ") if self._strips_prefix else content


def _bytes_of_piece(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return piece.replace(_SPACE_MARK, " ").encode() if match is None else bytes([int(match[1], 16)])
