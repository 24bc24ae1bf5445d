"""One corpus in every format."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from petatron.config.schema.data import TokenizerConfig
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.preprocess_report import PreprocessReport

BYTES = TokenizerConfig(tokenizer_type="ByteTokenizer")
TEXTS = ("one", 'deux, "quoted"\nand a second line', "日本\u2028語", "x" * 300, "last")
ROWS = [{"id": f"doc-{number}", "text": text, "n": number} for number, text in enumerate(TEXTS)]
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def jsonl(rows: Sequence[Mapping[str, object]] = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: Sequence[Mapping[str, object]] = ROWS, *, rows_per_group: int = 2) -> bytes:
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(list(rows)), buffer, row_group_size=rows_per_group)
    return buffer.getvalue()


def arrow(rows: Sequence[Mapping[str, object]] = ROWS, *, stream: bool = False) -> bytes:
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(list(rows))
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return buffer.getvalue()


def csv_text(rows: Sequence[Mapping[str, object]] = ROWS, *, delimiter: str = ",") -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def tar(members: Sequence[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def webdataset() -> bytes:
    members: list[tuple[str, bytes]] = []
    for row in ROWS:
        name = f"shard/{row['id']}"
        members += [(f"{name}.jpg", b"\xff\xd8"), (f"{name}.txt", str(row["text"]).encode())]
    return tar(members)


FILES: dict[str, Callable[[], bytes]] = {
    "corpus.jsonl": jsonl,
    "corpus.parquet": parquet,
    "corpus.arrow": arrow,
    "stream.arrow": lambda: arrow(stream=True),
    "corpus.csv": csv_text,
    "corpus.tsv": lambda: csv_text(delimiter="\t"),
    "corpus.tar": webdataset,
    **{f"corpus.jsonl.{name}": lambda pack=pack: pack(jsonl()) for name, pack in COMPRESSIONS.items()},
    "corpus.csv.gz": lambda: gzip.compress(csv_text()),
    "corpus.tar.zst": lambda: COMPRESSIONS["zst"](webdataset()),
}


def run(folder: Path, *inputs: str | Path, name: str = "out", **options: object) -> PreprocessReport:
    chosen = {"tokenizer": BYTES, "output_prefix": str(folder / name), "overwrite": True, **options}
    return preprocess(PreprocessOptions(inputs=tuple(map(str, inputs)), **chosen))  # type: ignore[arg-type]


def documents(prefix: str | Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [bytes(data.get_document(i).astype("u1")).decode() for i in range(data.num_documents)]
