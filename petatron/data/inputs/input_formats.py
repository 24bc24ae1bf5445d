"""The formats of input files, told by their names or their first bytes."""

from __future__ import annotations

from typing import Literal

InputFormat = Literal["auto", "jsonl", "text", "text-file", "parquet", "arrow", "csv", "huggingface", "webdataset"]
FileFormat = Literal["jsonl", "text", "text-file", "parquet", "arrow", "csv", "webdataset"]
INPUT_FORMATS: tuple[InputFormat, ...] = (
    "auto",
    "jsonl",
    "text",
    "text-file",
    "parquet",
    "arrow",
    "csv",
    "huggingface",
    "webdataset",
)
TEXT_FORMATS = ("text", "text-file")
"""Every document has one text and no keys, and nothing tells the two apart: they are never guessed."""
INDEXED_FORMATS = ("parquet", "arrow")
"""What is in a file and where is written at its end."""
_ENDINGS: dict[str, FileFormat] = {
    "jsonl": "jsonl",
    "json": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "ipc": "arrow",
    "csv": "csv",
    "tsv": "csv",
    "tar": "webdataset",
    "tgz": "webdataset",
}
TEXT_ENDINGS = ("txt", "text", "md")
DATA_ENDINGS = (*_ENDINGS, *TEXT_ENDINGS)
_COMPRESSED_ENDINGS = ("gz", "zst", "zstd", "bz2", "xz")
FORMAT_HEAD_BYTES = 265
_MAGICS: tuple[tuple[int, bytes, FileFormat], ...] = (
    (0, b"PAR1", "parquet"),
    (0, b"ARROW1\x00\x00", "arrow"),
    (0, b"\xff\xff\xff\xff", "arrow"),
    (257, b"ustar", "webdataset"),
)


def name_endings(name: str) -> tuple[str, str | None]:
    """Returns the last ending of a name, and what it is compressed with.

    >>> name_endings("c4/en.00001.json.gz"), name_endings("a.TSV"), name_endings("corpus")
    (('json', 'gz'), ('tsv', None), ('', None))
    """
    stem, _, ending = name.rpartition("/")[2].partition("?")[0].lower().rpartition(".")
    compression = None
    if ending in _COMPRESSED_ENDINGS:
        compression, (stem, _, ending) = ending, stem.rpartition(".")
    return (ending if stem else ""), compression


def format_of_name(name: str) -> FileFormat | None:
    """Returns the format that a name tells; None where it tells none.

    >>> format_of_name("train-00000.parquet"), format_of_name("a.jsonl.zst"), format_of_name("book.txt"), format_of_name("README")
    ('parquet', 'jsonl', None, None)
    """
    return _ENDINGS.get(name_endings(name)[0])


def format_of_head(head: bytes) -> FileFormat | None:
    """Returns the format that the first FORMAT_HEAD_BYTES of a file tell; None for what may be JSON lines.

    >>> format_of_head(b"PAR1..."), format_of_head(b'{"text": "PAR1"}')
    ('parquet', None)
    """
    return next((name for place, magic, name in _MAGICS if head[place : place + len(magic)] == magic), None)
