"""The steps of curation: JSON lines, plain, gzip and zstd, and evaluation files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Literal

import zstandard

from petatron.data.curate.contamination.decontaminate import DecontaminateOptions, decontaminate_documents
from petatron.data.curate.dedup.dedup_documents import DedupOptions, dedup_documents
from petatron.data.curate.dedup.min_hash import MinHashOptions
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.filter.filter_documents import FilterOptions, filter_documents
from petatron.data.curate.source_stats import file_stats
from petatron.data.curate.split_documents import split_documents
from tests.fuzz.kind import Files, Kind
from tests.fuzz.kinds.files import files_of

_SENTENCE = "It was a cold day, and nobody who had to go out did so without a coat and a pair of gloves."
_LINES = [
    {"text": f"{_SENTENCE}\n\n{_SENTENCE}\n- and more\n", "id": 1}, {"text": [_SENTENCE, "\u4f60\u597d \ud800"], "id": [2.5]},
    {"text": f"{_SENTENCE} x", "contamination": None}, {"text": "", "n": {"a": [None, True]}},
]  # fmt: skip
_TEXT = "\n".join(json.dumps(line) for line in _LINES).encode() + b"\n"
_PLAIN, _GZIP, _ZSTD = "plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst"
_EVALUATION, _STORY = "evaluation.jsonl", "story.txt"
_STEPS = ("dedup", "filter", "decontaminate", "split", "stats")
Step = Literal["dedup", "filter", "decontaminate", "split", "stats"]


def make(name: str) -> Kind:
    inner = {_PLAIN: _TEXT, _GZIP: _TEXT, _ZSTD: _TEXT}
    inner[_EVALUATION] = json.dumps({"q": [_SENTENCE, {"a": "b"}]}).encode()
    inner[_STORY] = f"One.\n\n{_SENTENCE}\n".encode()
    inputs = (_PLAIN, _GZIP, _ZSTD)
    return Kind(
        name,
        _seal(inner),
        doors={f"{step} {file}": _door(step, file) for step in _STEPS for file in inputs},
        formats={".jsonl": "jsonl", ".gz": "gzip"},
        inner=inner,
        reads={
            f"{step} {file}": (file, _EVALUATION, _STORY) if step == "decontaminate" else (file,)
            for step in _STEPS
            for file in inputs
        },
        streams=(".jsonl", ".gz", ".zst"),
        seal=_seal,
    )


def _seal(inner: Files) -> Files:
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(inner[_ZSTD])
    return {**inner, _GZIP: gzip.compress(inner[_GZIP], mtime=0), _ZSTD: packed}


def _door(step: Step, file: str) -> Any:
    def door(folder: Path, scratch: Path) -> Any:
        files = StepFiles(inputs=(str(folder / file),), output=str(scratch / "out"), on_error="skip")
        if step == "stats":
            return [source.as_json() for source in file_stats(files, None, duplicates=True)]
        summary = _run(step, files, folder)
        print("\n".join(summary.problems))
        return files_of(scratch)

    return door


def _run(step: Step, files: StepFiles, folder: Path) -> Any:
    if step == "dedup":
        return dedup_documents(files, DedupOptions(near=MinHashOptions(), exact_jaccard=True))
    if step == "filter":
        return filter_documents(files, FilterOptions(gopher=True, c4=True, languages=("en",), save_dropped=True))
    if step == "decontaminate":
        against = (str(folder / _EVALUATION), str(folder / _STORY))
        return decontaminate_documents(files, DecontaminateOptions(against=against, ngram=8, mark=True))
    return split_documents(files, held_out=0.5, seed=1)
