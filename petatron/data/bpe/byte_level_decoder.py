"""Token ids back to text; those of a byte-level BPE through a table of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted


def byte_characters() -> list[str]:
    """Returns the character that stands for each byte in a byte-level BPE: its own if it can be printed, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


class IdDecoder:
    """Decodes ids with the library, or from a table of bytes if the decoder is byte-level: generation decodes a few ids per token."""

    def __init__(self, fast: FastTokenizer, file: Path) -> None:
        self._fast, self._file = fast, file
        self._table = _TokenBytes(fast, file) if isinstance(fast.decoder, decoders.ByteLevel) else None

    def decode(self, ids: Sequence[int]) -> str:
        if self._table is not None:
            return b"".join([self._table[number] for number in ids]).decode(errors="replace")
        with reading_untrusted(self._file, _decode_error):
            return self._fast.decode([int(number) for number in ids], skip_special_tokens=False)


class _TokenBytes(dict[int, bytes]):
    """The bytes of the ids of a byte-level vocabulary, found when they are first asked for."""

    def __init__(self, fast: FastTokenizer, file: Path) -> None:
        self._fast, self._file = fast, file
        self._byte_of = {char: byte for byte, char in enumerate(byte_characters())}

    def __missing__(self, number: int) -> bytes:
        with reading_untrusted(self._file, _decode_error):
            name = self._fast.id_to_token(int(number)) or ""
        known = all(char in self._byte_of for char in name)  # an added token may have other characters: it is text
        self[number] = content = bytes(map(self._byte_of.__getitem__, name)) if known else name.encode()
        return content


def _decode_error(name: Path, why: str) -> DataError:
    return DataError(f"Token ids for the tokenizer {name} {why}. Check its files.")
