"""Bytes and text of single tokens, for log-probabilities.

A token of a byte-level vocabulary may be a part of a character, and `decode` of it alone gives a replacement character, the same for many.
So bytes come from the vocabulary itself: of a byte-level BPE, each character of a token stands for a byte; of SentencePiece, `<0xE2>` is
a byte and `▁` a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from petatron.data.bpe.byte_level_decoder import byte_characters
from petatron.data.tokenizer import Tokenizer, vocabulary_json

_TAG = re.compile(r"<.*>", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Names the tokens of a vocabulary.

    >>> from petatron.data.tokenizer import ByteTokenizer
    >>> texts = TokenTexts(ByteTokenizer())
    >>> texts.bytes_of(104), texts.text_of(104), texts.text_of(195)
    (b'h', 'h', 'bytes:\\\\xc3')
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        content = None if tokenizer is None else vocabulary_json(tokenizer)
        self._fast = None if content is None else FastTokenizer.from_buffer(content)
        decoder = json.dumps(json.loads(content).get("decoder")) if content is not None else ""
        self._byte_level = '"ByteLevel"' in decoder
        self._metaspace = "\\u2581" in decoder  # as `dumps` escapes it
        self._byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        added = {} if self._fast is None else self._fast.get_added_tokens_decoder()
        self._added = set(added)
        self.special_ids = {token: added_token.content for token, added_token in added.items() if added_token.special}
        """Ids that mark, and are no text, with their names."""
        self.marker_ids = {
            added_token.content: token
            for token, added_token in added.items()
            if added_token.special or _TAG.fullmatch(added_token.content)
        }
        """Tokens that grammars name by id: llguidance takes an added token for no text if it is special, or looks like a tag."""

    def bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        """Returns its text; `bytes:\\xe2\\x82` for a part of a character, as OpenAI writes it; `token_id:5` where there is no text."""
        content = self.bytes_of(token)
        if not content:
            return f"token_id:{token}"
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def decode(self, ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    def offsets(self, ids: Sequence[int]) -> list[int]:
        """Returns where in the text of all of them each begins, in characters: that which its first byte belongs to."""
        starts: list[int] = []
        count = 0
        for token in ids:
            start, count = self.place(token, count)
            starts.append(start)
        return starts

    def place(self, token: int, count: int) -> tuple[int, int]:
        """Returns where a token begins after `count` characters, and how many there are with it."""
        content = self.bytes_of(token)
        start = max(count - 1, 0) if content and _continues(content[0]) else count
        return start, count + sum(not _continues(byte) for byte in content)

    def _find_bytes(self, token: int) -> bytes:
        name = None if self._fast is None else self._fast.id_to_token(token)
        if name is None or token in self._added:
            text = name or ("" if self._tokenizer is None else self._tokenizer.decode([token]))
            return text.encode(errors="replace")
        if self._byte_level and all(char in self._byte_of for char in name):
            return bytes(self._byte_of[char] for char in name)
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        return (name.replace("\u2581", " ") if self._metaspace else name).encode(errors="replace")


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 belongs to the character before."""
    return byte & 0xC0 == 0x80
