"""The vocab.txt of a WordPiece tokenizer: a token on each line, whose id is the number of the line."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.data.tokenizers_library import MAX_TOKENIZER_BYTES

UNKNOWN, CLASSIFIER, SEPARATOR, PADDING, MASK = SPECIAL_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
"""The tokens that every vocabulary of BERT has."""


@dataclass(frozen=True, slots=True)
class WordPieceVocabulary:
    """The ids of a vocab.txt by token, and the bytes of the file."""

    ids: Mapping[str, int]
    content: bytes


def read_vocabulary(path: Path) -> WordPieceVocabulary:
    """Reads a vocab.txt; of a token on several lines, the last one counts, as in transformers."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"Tokenizer file {printable(str(path))} {what}. Check --vocab-file.")
    with reading_untrusted(path, _vocabulary_error):
        content = read_limited_bytes(path, MAX_TOKENIZER_BYTES)
        lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        ids = {line.removesuffix("\n"): number for number, line in enumerate(lines)}
    if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
        raise _vocabulary_error(path, f"has no {' '.join(missing)}")
    return WordPieceVocabulary(ids, content)


def _vocabulary_error(path: Path, why: str) -> DataError:
    return DataError(
        f"{printable(str(path))} is not the vocabulary of a WordPiece tokenizer: it {why}. Give --vocab-file the vocab.txt of a BERT "
        "model, with a token on each line."
    )
