"""Measures a tokenizer's compression: the bytes of text per token, by which tokenizers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.data.tokenizer import Tokenizer

_UNKNOWN_NAMES = ("[UNK]", "<unk>")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Compression:
    """Bytes of UTF-8 and tokens of some texts; `num_unknown` tokens stand for text without an id, which is lost."""

    num_bytes: int
    num_tokens: int
    num_unknown: int

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / max(self.num_tokens, 1)


def measure_compression(tokenizer: Tokenizer, texts: Sequence[str]) -> Compression:
    """Tokenizes texts and counts."""
    unknown = _unknown_ids(tokenizer)
    num_tokens = num_unknown = 0
    for start in range(0, len(texts), _BATCH):
        for ids in tokenizer.encode_batch(texts[start : start + _BATCH]):
            num_tokens += len(ids)
            num_unknown += sum(number in unknown for number in ids) if unknown else 0
    return Compression(sum(len(text.encode()) for text in texts), num_tokens, num_unknown)


def _unknown_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the ids of the tokens for unknown text; none where their names are plain text."""
    encoded = tokenizer.encode_batch(_UNKNOWN_NAMES)
    ids = [ids[0] for name, ids in zip(_UNKNOWN_NAMES, encoded) if len(ids) == 1 and tokenizer.decode(ids) == name]
    return frozenset(ids)
