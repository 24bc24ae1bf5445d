"""The error for a data file, an index or a tokenizer that cannot be used (`base/untrusted_files.py`)."""

from __future__ import annotations

from pathlib import Path

from petatron.base.errors import DataError


def data_file_error(path: str | Path, why: str) -> DataError:
    return DataError(f"{path} {why}. Check the file, or copy it again.")
