"""What tokenizers of the tokenizers library share: texts in batches, and ids that decode from a table of bytes where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.bpe.byte_fallback_decoder import ByteFallbackDecoder
from petatron.data.bpe.byte_level_decoder import decode_error
from petatron.data.bpe.word_encoder import WordEncoder, word_encoder
from petatron.data.encoded_text import EncodedText
from petatron.data.special_tokens import find_sentinels
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint, library_fingerprint

MAX_TOKENIZER_BYTES = 1 << 28
"""The largest files of published tokenizers have some 40 MB."""


class LibraryTokenizer:
    """A tokenizer of the tokenizers library."""

    name: str
    eod: int | None
    bod: int | None = None
    special_ids: Mapping[str, int]
    _fast: FastTokenizer
    _table: Mapping[int, bytes] | None

    def encode(self, text: str) -> list[int]:
        with reading_untrusted(Path(self.name), _encode_error):
            # The fast variant omits character offsets, which nothing here uses; and, unlike `encode`, it lets other threads run meanwhile.
            return self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_with_offsets(self, text: str) -> EncodedText:
        with reading_untrusted(Path(self.name), _encode_error):
            encoding = self._fast.encode(text, add_special_tokens=False)
        return EncodedText(encoding.ids, encoding.offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts, by words if a known pattern divides them: that is several times as fast for more than a few texts."""
        with reading_untrusted(Path(self.name), _encode_error):
            if self._word_encoder is not None:
                return [self._word_encoder.encode(text) for text in texts]
            return [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    @property
    def sentinel_ids(self) -> tuple[int, ...]:
        return find_sentinels(self._fast.token_to_id)

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> TokenizerFingerprint:
        return library_fingerprint(self._fast)

    @cached_property
    def _word_encoder(self) -> WordEncoder | None:
        return word_encoder(self._fast)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes from a table of bytes if the decoder is byte-level: generation decodes a few ids per token."""
        if self._table is not None:
            return b"".join([self._table[number] for number in ids]).decode(errors="replace")
        with reading_untrusted(Path(self.name), decode_error):
            return self._fast.decode([int(number) for number in ids], skip_special_tokens=False)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Decodes to bytes where tokens stand for bytes; else the text of `decode` in UTF-8, for there are no others.

        An added token is its text. The library's decoder, and `decode` with it, takes the letters of one like `café` for the bytes that
        they stand for.
        """
        if (table := self._table) is not None:
            added = self._added_bytes
            return b"".join([added.get(number) or table[number] for number in ids])
        if self._byte_fallback is not None:
            return self._byte_fallback.decode(ids)
        return self.decode(ids).encode()

    @cached_property
    def _added_bytes(self) -> dict[int, bytes]:
        return {number: token.content.encode() for number, token in self._fast.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_fallback(self) -> ByteFallbackDecoder | None:
        return ByteFallbackDecoder.of(self._fast)


def load_fast(content: bytes) -> FastTokenizer:
    """Opens a tokenizer.json without the truncation and padding that it may ask for."""
    fast = FastTokenizer.from_buffer(content)
    fast.no_truncation()
    fast.no_padding()
    return fast


def tokenizer_config(special_tokens: Mapping[str, str | None]) -> dict[str, bytes]:
    """Returns the tokenizer_config.json with which AutoTokenizer opens a tokenizer.json; `eos_token` and the like name its tokens."""
    named = {name: token for name, token in special_tokens.items() if token is not None}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    return {"tokenizer_config.json": json.dumps(content, indent=1).encode()}


def _encode_error(name: Path, why: str) -> DataError:
    return DataError(f"A text for the tokenizer {name} {why}. Check the text and the tokenizer's files.")
