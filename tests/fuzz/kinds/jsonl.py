"""Text to be tokenized: JSON lines, plain, gzip and zstd.

No digest covers plain text. The checksums of gzip and zstd cover what they hold against flipped bits, not against someone who
adds to it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Literal

import zstandard

from petatron.config.schema.data import TokenizerConfig
from petatron.data.preprocess import PreprocessOptions, preprocess
from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds.files import files_of

_LINES = [
    {"text": "Hello, wörld", "title": "a"}, {"text": ["one sentence.", "and another."], "title": ["b", "c"]}, {"text": "",
    "title": "\u2028"},
    {"text": "x" * 300, "title": "d", "meta": {"n": [1, 2.5, None]}},
]  # fmt: skip
_TEXT = "\n".join(json.dumps(line) for line in _LINES).encode() + b"\n"
_WAYS = ("fail", "skip", "text")
_PLAIN, _GZIP, _ZSTD = "plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst"


def make(name: str) -> Kind:
    inner = {_PLAIN: _TEXT, _GZIP: _TEXT, _ZSTD: _TEXT}
    return Kind(
        name,
        _seal(inner),
        doors={f"{file} {how}": _door(file, how) for file in inner for how in _WAYS},
        formats={".jsonl": "jsonl", ".gz": "gzip"},
        inner=inner,
        reads={f"{file} {how}": (file,) for file in inner for how in _WAYS},
        streams=(".jsonl", ".gz", ".zst"),
        seal=_seal,
    )


def _seal(inner: Files) -> Files:
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(inner[_ZSTD])
    return {_PLAIN: inner[_PLAIN], _GZIP: gzip.compress(inner[_GZIP], mtime=0), _ZSTD: packed}


def _door(file: str, how: Literal["fail", "skip", "text"]) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        text = how == "text"
        options = PreprocessOptions(
            inputs=(str(folder / file),),
            output_prefix=str(scratch / "out"),
            tokenizer=TokenizerConfig(tokenizer_type="ByteTokenizer"),
            json_keys=("text",) if text else ("text", "title"),
            input_format="text" if text else "jsonl",
            append_eod=True,
            on_error="fail" if how == "text" else how,
        )
        print("\n".join(preprocess(options).problems))
        return files_of(scratch)

    return door
