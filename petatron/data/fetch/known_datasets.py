"""Public datasets that `petatron data fetch` knows by a short name: one table.

A license is repeated here only for the list; what a fetch shows and records is the dataset card's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Join = Literal["none", "articles", "file"]
"""What makes a document: each row, the rows from one WikiText heading to the next, or all rows of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDataset:
    """Where a dataset is, and how its rows become documents. `splits` has file globs, `download` the size of all splits."""

    repository: str
    splits: Mapping[str, tuple[str, ...]]
    license: str
    download: str
    summary: str
    text_key: str = "text"
    join: Join = "none"


def _wikitext(config: str, download: str, summary: str) -> KnownDataset:
    splits = {split: (f"{config}/{split}-*.parquet",) for split in ("train", "validation", "test")}
    return KnownDataset(
        repository="Salesforce/wikitext",
        splits=splits,
        license="cc-by-sa-3.0, gfdl",
        download=download,
        summary=summary,
        join="articles",
    )


KNOWN_DATASETS: Mapping[str, KnownDataset] = {
    "wikitext2": _wikitext(
        "wikitext-2-raw-v1", "8 MB", "720 good Wikipedia articles, 2 million words: for a first try"
    ),
    "wikitext103": _wikitext("wikitext-103-raw-v1", "0.3 GB", "28,595 good Wikipedia articles, 103 million words"),
    "tinystories": KnownDataset(
        repository="roneneldan/TinyStories",
        splits={"train": ("data/train-*.parquet",), "validation": ("data/validation-*.parquet",)},
        license="cdla-sharing-1.0",
        download="1 GB",
        summary="2.1 million short synthetic stories in simple English; models of a few million parameters learn them",
    ),
    "fineweb-edu-sample": KnownDataset(
        repository="HuggingFaceFW/fineweb-edu",
        splits={"train": ("sample/10BT/*.parquet",)},
        license="odc-by",
        download="28 GB",
        summary="educational web pages, a sample of 10 billion tokens",
    ),
    "fineweb-sample": KnownDataset(
        repository="HuggingFaceFW/fineweb",
        splits={"train": ("sample/10BT/*.parquet",)},
        license="odc-by",
        download="30 GB",
        summary="filtered web pages, a sample of 10 billion tokens",
    ),
    "wikipedia-simple": KnownDataset(
        repository="wikimedia/wikipedia",
        splits={"train": ("20231101.simple/*.parquet",)},
        license="cc-by-sa-3.0, gfdl",
        download="0.2 GB",
        summary="Wikipedia in simple English, November 2023",
    ),
    "wikipedia-en": KnownDataset(
        repository="wikimedia/wikipedia",
        splits={"train": ("20231101.en/*.parquet",)},
        license="cc-by-sa-3.0, gfdl",
        download="12 GB",
        summary="English Wikipedia, November 2023",
    ),
    "c4-en": KnownDataset(
        repository="allenai/c4",
        splits={"train": ("en/c4-train.*.json.gz",), "validation": ("en/c4-validation.*.json.gz",)},
        license="odc-by",
        download="305 GB",
        summary="web pages of April 2019, cleaned; give --max-documents or --max-bytes",
    ),
}
