"""A public dataset to be converted: parquet, JSON lines, text, its card, and the record of an earlier fetch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from petatron.data.fetch.download_dataset import run_fetch
from petatron.data.fetch.plan_download import RECORD_FILE, FetchOptions, plan_fetch
from tests.fuzz.kind import Kind
from tests.fuzz.kinds.files import files_of

_ROWS = [" = Title = \n", "", "Hello, wörld", None, "x" * 300, "\u2028", "last"]
_PARQUET, _JSON, _TEXT = "a.parquet", "b.jsonl", "c.txt"
_CARD = b"---\nlicense:\n- odc-by\n- gfdl\n---\nNotes\n"


def make(name: str) -> Kind:
    lines = "".join(json.dumps({"text": row, "id": 1}) + "\n" for row in _ROWS)
    files = {_PARQUET: _parquet(), _JSON: lines.encode(), _TEXT: b"one\n\ntwo\n", "README.md": _CARD}
    inner = {f"hub/ann/notes/{file}": content for file, content in files.items()}
    doors = {f"{file} {join}": _door(file, join) for file in (_PARQUET, _JSON, _TEXT) for join in ("none", "articles")}
    reads = {f"{file} {join}": (f"hub/ann/notes/{file}", "hub/ann/notes/README.md") for file, join in
             (door.split() for door in doors)}  # fmt: skip
    return Kind(name, inner, doors=doors, formats={".jsonl": "jsonl"}, inner=inner, reads=reads)


def _parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": _ROWS, "id": list(range(len(_ROWS)))}), file, row_group_size=3)
    return file.getvalue()


def _door(file: str, join: Any) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        options = FetchOptions(
            dataset="ann/notes", hub=str(folder / "hub"), output=str(scratch / "out"), files=(file,), join=join
        )
        run_fetch(plan_fetch(options))
        return {name: content for name, content in files_of(scratch).items() if not name.endswith(RECORD_FILE)}

    return door
