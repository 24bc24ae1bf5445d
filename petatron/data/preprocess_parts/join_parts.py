"""Joins the finished parts of a job, in order, and publishes its datasets.

What is joined lies in the folder of the parts until it is complete, so that an end at any moment leaves parts to join again. Of one part
the files are renamed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from petatron.base.errors import DataError
from petatron.data.document_provenance import ProvenanceTable, ProvenanceWriter, sources_path
from petatron.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.preprocess_parts.part_report import PartReport, lines_before_parts
from petatron.data.preprocess_parts.part_writer import WriteOptions
from petatron.data.preprocess_parts.parts_folder import PartsFolder, TokenizingJob
from petatron.data.recorded_tokenizer import recorded_tokenizer_path


def join_parts(
    folder: PartsFolder,
    job: TokenizingJob,
    reports: Sequence[PartReport],
    options: WriteOptions,
) -> None:
    """Replaces the datasets of all outputs by the joined ones. reports: those of all parts, in order."""
    joined: list[tuple[str, str]] = []
    for output in options.outputs:
        prefixes = [folder.part_prefix(part, output) for part in range(job.num_parts)]
        if len(prefixes) == 1:
            joined.append((prefixes[0], output))
            continue
        target = str(folder.path / f"joined{Path(prefixes[0]).name.removeprefix('00000')}")
        with IndexedWriter(target, options.dtype) as writer:
            for prefix in prefixes:
                if bin_path(prefix).stat().st_size:  # a dataset without documents is none
                    writer.add_dataset(_checked_part(folder, prefix, writer.dtype))
        if options.with_sources:
            _join_sources(folder, job, reports, prefixes, target)
        joined.append((target, output))
    for prefix, output in joined:
        _publish(prefix, output, options)


def _checked_part(folder: PartsFolder, prefix: str, dtype: np.dtype) -> IndexedDataset:
    dataset = IndexedDataset(prefix)
    if dataset.dtype != dtype:
        raise _damaged(
            folder, f"{dataset.idx} says that its tokens are {dataset.dtype}, and those of the job are {dtype}"
        )
    return dataset


def _damaged(folder: PartsFolder, what: str) -> DataError:
    return DataError(f"{what}. Remove {folder.path}, and run the command again.")


def _join_sources(
    folder: PartsFolder, job: TokenizingJob, reports: Sequence[PartReport], prefixes: Sequence[str], target: str
) -> None:
    firsts = [cut.file for cut in job.cuts]
    lines_before = lines_before_parts(
        reports,
        [cut.offset > 0 and job.files[cut.file].format != "parquet" for cut in job.cuts],
        [len(job.slices(part)) == 1 for part in range(job.num_parts)],
    )
    with ProvenanceWriter(target, [file.path for file in job.files]) as writer:
        for prefix, first_file, lines in zip(prefixes, firsts, lines_before, strict=True):
            sources = ProvenanceTable(prefix)
            numbers = range(first_file, first_file + len(sources.files))
            if numbers.stop > len(job.files):
                raise _damaged(folder, f"{sources.path} names files that the job does not have")
            writer.add_table(sources, file_numbers=numbers, lines_before=(0, lines))


def _publish(prefix: str, output: str, options: WriteOptions) -> None:
    """Moves the files of a dataset; the index goes first and comes last, so that a prefix with one is complete."""
    try:
        idx_path(output).unlink(missing_ok=True)
        sources_path(output).unlink(missing_ok=True)
        recorded_tokenizer_path(output).unlink(missing_ok=True)
        os.replace(bin_path(prefix), bin_path(output))
        if options.with_sources:
            os.replace(sources_path(prefix), sources_path(output))
        if options.tokenizer is not None:
            options.tokenizer.write(output)
        os.replace(idx_path(prefix), idx_path(output))
    except OSError as error:
        raise DataError(f"Cannot write {output}: {error.strerror or error}. Choose another output prefix.") from error
