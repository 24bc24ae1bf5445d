"""The bytes of the token ids of a byte-level BPE."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted


def byte_characters() -> list[str]:
    """Returns the character that stands for each byte in a byte-level BPE: its own if it can be printed, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


class ByteTable(dict[int, bytes]):
    """The bytes of the ids of a byte-level vocabulary, found when they are first asked for."""

    def __init__(self, fast: FastTokenizer, file: Path) -> None:
        self._fast, self._file = fast, file
        self._byte_of = {char: byte for byte, char in enumerate(byte_characters())}

    def __missing__(self, number: int) -> bytes:
        with reading_untrusted(self._file, decode_error):
            name = self._fast.id_to_token(int(number)) or ""
        known = all(char in self._byte_of for char in name)  # an added token may have other characters: it is text
        self[number] = content = bytes(map(self._byte_of.__getitem__, name)) if known else name.encode()
        return content


def decode_error(name: Path, why: str) -> DataError:
    return DataError(f"Token ids for the tokenizer {name} {why}. Check its files.")
