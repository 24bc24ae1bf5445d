"""Encodes texts and pairs of texts as a model reads them whole: with the ids that its tokenizer puts around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.base.errors import DataError
from petatron.data.prompt.prompt_encoder import check_unicode, surrounding_ids
from petatron.data.tokenizer import Tokenizer

_BETWEEN = "\n"
"""What is between the two texts that a decoder reads."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The ids of a text. second: where the second text of a pair begins, the length if there is none. is_cut: whether it was longer."""

    ids: list[int]
    second: int
    is_cut: bool = False


class TextEncoder:
    """Encodes texts with the ids that the tokenizer puts around one; of pairs, encoders get two texts, decoders one.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> [row.ids for row in TextEncoder(ByteTokenizer(), is_encoder=False).encode([("hi",), ("a", "b")], 8)]
    [[104, 105], [97, 10, 98]]
    """

    def __init__(self, tokenizer: Tokenizer, *, is_encoder: bool) -> None:
        before, after = surrounding_ids(tokenizer)
        special = tokenizer.special_ids
        if is_encoder and not before and "cls" in special and "sep" in special:
            before, after = (special["cls"],), (special["sep"],)
        self._tokenizer, self._is_encoder = tokenizer, is_encoder
        self._before, self._after = before, after
        self.padding_id = special.get("pad", tokenizer.eod or 0)

    def encode(self, texts: Sequence[tuple[str, ...]], max_tokens: int) -> list[TokenRow]:
        """Returns a row of each text; of longer ones the end is left out, of pairs the end of the longer text."""
        for text in texts:
            for part in text:
                check_unicode(part)
        if not self._is_encoder:
            texts = [(_BETWEEN.join(text),) for text in texts]
        encoded = iter(self._tokenizer.encode_batch([part for text in texts for part in text]))
        return [self._row([next(encoded) for _ in text], max_tokens) for text in texts]

    def _row(self, parts: Sequence[list[int]], max_tokens: int) -> TokenRow:
        room = max_tokens - len(self._before) - len(parts) * len(self._after)
        if room < len(parts):
            raise DataError(f"--seq-length {max_tokens} has no room for a text. Use a longer one.")
        kept = [part[:length] for part, length in zip(parts, _kept_lengths([*map(len, parts)], room), strict=True)]
        ids = [*self._before, *kept[0], *self._after]
        second = len(ids)
        for part in kept[1:]:
            ids += [*part, *self._after]
        return TokenRow(ids, second, is_cut=sum(map(len, parts)) > room)


def _kept_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Returns how much is kept of one text or two: of two, the shorter one keeps up to half of the room.

    >>> _kept_lengths([9, 2], 8), _kept_lengths([9, 9], 7), _kept_lengths([9], 8)
    ([6, 2], [4, 3], [8])
    """
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    second = min(second, max(room // 2, room - first))
    return [min(first, room - second), second]
