"""Public datasets that `petatron data fetch` knows by a short name: one table.

A license is repeated here only for the list; what a fetch shows and records is the dataset card's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Join = Literal["none", "articles", "file"]
"""What makes a document: each row, the rows from one WikiText heading to the next, or all rows of a file."""


@dataclass(frozen=True, slots=True)
class KnownDataset:
    """Where a dataset is, and how its rows become documents. `splits` has file globs, `download` the size of all splits."""

    repository: str
    splits: Mapping[str, tuple[str, ...]]
    license: str = ""
    download: str = ""
    summary: str = ""
    text_key: str = "text"
    join: Join = "none"


def _globs(pattern: str, *splits: str) -> dict[str, tuple[str, ...]]:
    """Returns the files of each split, where the pattern has its name for `*SPLIT*`."""
    return {split: (pattern.replace("*SPLIT*", split),) for split in splits}


_WIKI_LICENSE = "cc-by-sa-3.0, gfdl"
_WIKITEXT_SPLITS = ("train", "validation", "test")
_STORIES = "2.1 million short synthetic stories in simple English; models of a few million parameters learn them"
KNOWN_DATASETS: Mapping[str, KnownDataset] = {
    "wikitext2": KnownDataset("Salesforce/wikitext", _globs("wikitext-2-raw-v1/*SPLIT*-*.parquet", *_WIKITEXT_SPLITS), _WIKI_LICENSE,
     "8 MB", "720 good Wikipedia articles, 2 million words: for a first try", "text", "articles"),
    "wikitext103": KnownDataset("Salesforce/wikitext", _globs("wikitext-103-raw-v1/*SPLIT*-*.parquet", *_WIKITEXT_SPLITS), _WIKI_LICENSE,
     "0.3 GB", "28,595 good Wikipedia articles, 103 million words", "text", "articles"),
    "tinystories": KnownDataset("roneneldan/TinyStories", _globs("data/*SPLIT*-*.parquet", "train", "validation"), "cdla-sharing-1.0",
     "1 GB", _STORIES),
    "fineweb-edu-sample": KnownDataset("HuggingFaceFW/fineweb-edu", _globs("sample/10BT/*.parquet", "train"), "odc-by",
     "28 GB", "educational web pages, a sample of 10 billion tokens"),
    "fineweb-sample": KnownDataset("HuggingFaceFW/fineweb", _globs("sample/10BT/*.parquet", "train"), "odc-by",
     "30 GB", "filtered web pages, a sample of 10 billion tokens"),
    "wikipedia-simple": KnownDataset("wikimedia/wikipedia", _globs("20231101.simple/*.parquet", "train"), _WIKI_LICENSE,
     "0.2 GB", "Wikipedia in simple English, November 2023"),
    "wikipedia-en": KnownDataset("wikimedia/wikipedia", _globs("20231101.en/*.parquet", "train"), _WIKI_LICENSE,
     "12 GB", "English Wikipedia, November 2023"),
    "c4-en": KnownDataset("allenai/c4", _globs("en/c4-*SPLIT*.*.json.gz", "train", "validation"), "odc-by",
     "305 GB", "web pages of April 2019, cleaned; give --max-documents or --max-bytes"),
}  # fmt: skip
