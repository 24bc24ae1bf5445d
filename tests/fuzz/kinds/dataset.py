"""Token files: two .idx/.bin pairs, and the cache of sample indices beside them.

No digest covers tokens and index: other tokens are other data. The cache is made from them, so whatever is in it, the samples are the
same.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from petatron.data.build_datasets import build_datasets
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from petatron.validate import load_config
from tests.fuzz.kind import Case, Kind
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of

_FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --num-query-groups 1 --seq-length 8 --vocab-size 100 "
    "--max-position-embeddings 8 --lr 1e-3 --train-iters 2 --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 1 --split 100,0,0 --eval-iters 0"
)


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder))
        _samples(Path(folder), Path(folder))
        files = files_of(Path(folder))
    return Kind(
        name,
        files,
        doors={"open": _open, "inspect": _inspect, "merge": _merge, "samples": _samples},
        shares={"open": 4, "merge": 0.5, "samples": 2},
        formats={".idx": "index", ".npy": "npy", ".json": "json"},
        reads={"open": ("one", "several"), "inspect": ("one", "several"), "merge": ("one",)},
        streams=(".bin",),
        covered=_covered,
    )


def _covered(case: Case) -> bool:
    return case.door == "samples" and all(path.startswith("cache/") for path in case.changes)


def _write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "one", "uint16") as writer:
        for length in (5, 9, 1, 12):
            writer.add_document(rng.integers(0, 99, length).tolist())
    with IndexedWriter(folder / "several", "int32") as writer:
        writer.add_sequences(
            rng.integers(0, 99, 20).astype(np.int32),
            np.array([4, 6, 10], np.int32),
            sequences_per_document=np.array([2, 1], np.int32),
        )


def _open(folder: Path, scratch: Path) -> Any:
    found = []
    for name in ("one", "several"):
        dataset = IndexedDataset(folder / name)
        for number in range(min(dataset.num_documents, 2000)):
            tokens = dataset.get_document(number)
            assert len(tokens) == dataset.document_lengths[number]
            found.append(tokens[:2000].tolist())
        for number in range(min(dataset.num_sequences, 2000)):
            found.append(dataset.get(number)[:2000].tolist())
    return found


def _inspect(folder: Path, scratch: Path) -> Any:
    return [petatron_says("data", "inspect", str(folder / name), "--document", "1") for name in ("one", "several")]


def _merge(folder: Path, scratch: Path) -> Any:
    petatron_says(
        "data", "merge", "--input", str(folder / "one"), str(folder / "one"), "--output-prefix", str(scratch / "both")
    )
    return files_of(scratch)


def _samples(folder: Path, scratch: Path) -> Any:
    """Training samples through the cache that is beside the data."""
    words = [*_FLAGS.split(), "--data-path", "0.5", str(folder / "one"), "0.5", str(folder / "several")]
    config = load_config(words).config
    data = build_datasets(config, None, (8, 0, 0)).train
    assert data is not None
    content = hashlib.blake2b(digest_size=8)
    for number in range(len(data)):
        sample = data[number]
        content.update(repr(np.asarray(getattr(sample, "tokens", sample)).tolist()).encode())
    return len(data), content.hexdigest()
