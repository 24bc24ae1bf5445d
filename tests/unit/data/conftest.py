"""Token files for the data tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from petatron.data.writer import IndexedWriter

MakeDataset = Callable[..., str]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Write documents under a name and return the prefix."""

    def make(documents: Sequence[Sequence[int]], name: str = "data", dtype: str = "uint16") -> str:
        prefix = str(tmp_path / name)
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return prefix

    return make
