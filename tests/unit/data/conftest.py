"""Token files for the data tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from petatron.data.indexed_writer import IndexedWriter

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


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Commands set up logging for their process; each test starts and ends without that."""
    logger = logging.getLogger("petatron")
    before = logger.handlers[:], logger.propagate, logger.level
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])
