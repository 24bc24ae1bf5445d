"""The formats of inputs besides plain JSON lines: what is tokenized, split and described is read from each.

No digest covers rows: others are other texts. `inner` is what is packed again: lines and tars under a compression.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from petatron.config.schema.data import TokenizerConfig
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.source_stats import file_stats
from petatron.data.curate.split_documents import split_documents
from petatron.data.inputs.input_formats import InputFormat
from petatron.data.preprocess import PreprocessOptions, preprocess
from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds.files import files_of

_TEXTS = ("Hello, wörld", 'a "quote", and\na second line', "", "x" * 300, "\u2028 last")
_ROWS = [
    {"text": text, "title": f"t{n}", "id": f"d{n}", "n": n, "meta": {"list": [n, None]}}
    for n, text in enumerate(_TEXTS)
]
_MAX_LINE_BYTES = 1 << 22
_FORMATS = {
    ".tar": "tar", ".tar.gz": "tar", ".gz": "gzip", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".json": "json",
    ".jsonl.bz2": "jsonl", ".jsonl.xz": "jsonl", ".jsonl.zst": "jsonl",
}  # fmt: skip
"""Those of what is in a packed file are mutated before it is packed; packed they are no such format, and their bytes change."""
_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0),
    "zst": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def make(name: str) -> Kind:
    inner: Files = {}
    form: InputFormat = "auto"
    if name == "parquet":
        files = {"plain.parquet": _parquet(packed=False), "packed.parquet": _parquet(packed=True)}
    elif name == "arrow":
        files = {"rows.arrow": _arrow(stream=False), "stream.arrow": _arrow(stream=True)}
    elif name == "saved-dataset":
        files, form = _saved_dataset(), "huggingface"
    elif name == "csv":
        files = inner = {"rows.csv": _csv(","), "rows.tsv": _csv("\t")}
    elif name == "webdataset":
        inner = {"rows.tar": _tar(tarfile.PAX_FORMAT), "old.tar.gz": _tar(tarfile.GNU_FORMAT)}
        files = _seal(inner)
    else:
        inner = {f"lines.jsonl.{ending}": _lines() for ending in _PACKERS}
        files = _seal(inner)
    inputs = ("saved",) if name == "saved-dataset" else tuple(files)
    doors = {f"{path} {how}": _door(path, how, form) for path in inputs for how in _DOORS}
    return Kind(
        name,
        files,
        doors=doors,
        formats=_FORMATS,
        inner=inner,
        seal=_seal,
        reads={door: (door.partition(" ")[0],) for door in doors},
        streams=(".csv", ".tsv", ".tar", *_PACKERS),
    )


def _seal(inner: Files) -> Files:
    """Packs what the end of its name says."""
    return {path: _PACKERS.get(path.rpartition(".")[2], bytes)(content) for path, content in inner.items()}


def _lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in _ROWS).encode()


def _parquet(*, packed: bool) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    compression = "zstd" if packed else "none"
    table = pyarrow.Table.from_pylist(_ROWS)
    parquet.write_table(
        table, file, row_group_size=2, compression=compression, use_dictionary=packed, write_page_index=packed
    )
    return file.getvalue()


def _arrow(*, stream: bool) -> bytes:
    import pyarrow
    from pyarrow import ipc

    file = io.BytesIO()
    table = pyarrow.Table.from_pylist(_ROWS)
    with (ipc.new_stream if stream else ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def _saved_dataset() -> Files:
    """The files of `datasets.Dataset.save_to_disk`."""
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "f0",
        "_format_type": None,
        "_split": "train",
    }
    content = {
        "state.json": json.dumps(state).encode(),
        "dataset_info.json": b"{}",
        **{name: _arrow(stream=True) for name in names},
    }
    return {f"saved/{name}": data for name, data in content.items()}


def _csv(delimiter: str) -> bytes:
    import csv

    file = io.StringIO()
    writer = csv.DictWriter(file, list(_ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(_ROWS)
    return file.getvalue().encode()


def _tar(form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for number, row in enumerate(_ROWS):
            folder = "long/" * 30 if number == 2 else "shard"
            rest = {key: value for key, value in row.items() if key != "text"}
            for ending, content in (
                ("jpg", b"\xff\xd8"),
                ("txt", row["text"].encode()),
                ("json", json.dumps(rest).encode()),
            ):
                info = tarfile.TarInfo(f"{folder}/{number:04d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def _tokenized(path: Path, form: InputFormat, scratch: Path, **options: Any) -> Any:
    chosen = PreprocessOptions(
        inputs=(str(path),),
        output_prefix=str(scratch / "out"),
        tokenizer=TokenizerConfig(tokenizer_type="ByteTokenizer"),
        input_format=form,
        max_line_bytes=_MAX_LINE_BYTES,
        part_bytes=_part_bytes(path),
        **options,
    )
    print("\n".join(preprocess(chosen).problems))
    return {name: content for name, content in files_of(scratch).items() if not name.endswith(".sources")}


def _part_bytes(path: Path) -> int:
    """Returns a size of which a file has a few parts: every one begins with a search for the end of a line, which may be far."""
    return max(300, path.stat().st_size // 8) if path.is_file() else 300


def _step_files(path: Path, form: InputFormat, scratch: Path) -> StepFiles:
    return StepFiles(
        inputs=(str(path),),
        output=str(scratch / "out"),
        input_format=form,
        on_error="skip",
        max_line_bytes=_MAX_LINE_BYTES,
    )


def _split(path: Path, form: InputFormat, scratch: Path) -> Any:
    summary = split_documents(_step_files(path, form, scratch), held_out=0.5, seed=1)
    print("\n".join(summary.problems))
    return {name: content for name, content in files_of(scratch).items() if not name.endswith("summary.json")}


def _stats(path: Path, form: InputFormat, scratch: Path) -> Any:
    files = check_step_files(_step_files(path, form, scratch), step="describe", parts=())
    return [{**source.as_json(), "source": ""} for source in file_stats(files, None, duplicates=True)]


_DOORS: dict[str, Callable[[Path, InputFormat, Path], Any]] = {
    "fail": partial(_tokenized, on_error="fail"),
    "skip": partial(_tokenized, on_error="skip"),
    "two keys": partial(_tokenized, on_error="skip", json_keys=("text", "title")),
    "split": _split,
    "stats": _stats,
}


def _door(path: str, how: str, form: InputFormat) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        return _DOORS[how](folder / path, form, scratch)

    return door
