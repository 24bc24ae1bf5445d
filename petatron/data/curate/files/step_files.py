"""The input and output options of every curation step, and their checks before any work.

Inputs are of any format, and outputs are JSON lines. An output has the name of its input, with another ending where the input is none of
JSON lines: `rows.parquet` becomes `rows.jsonl`, and `rows.csv.gz` `rows.jsonl.gz`.
"""

from __future__ import annotations

import os
import posixpath
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.data.inputs.curation_output_folder import SUMMARY_FILE
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_formats import DATA_ENDINGS, InputFormat, name_endings
from petatron.data.inputs.input_slice import ReadOptions
from petatron.data.inputs.line_blocks import BLOCK_BYTES, MAX_LINE_BYTES

OnError = Literal["fail", "skip"]
Compression = Literal["same", "none"]
COMPRESSIONS: tuple[Compression, ...] = ("same", "none")
ID_KEY = "id"
"""Where a sample of a tar that has no such key has its name, as for `data preprocess`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """What to read, and the folder to write."""

    inputs: tuple[str, ...]
    """Files, patterns, folders or addresses."""
    output: str
    input_format: InputFormat = "auto"
    json_key: str = "text"
    """The key whose value is the text: a string, or a list of strings, which are lines."""
    workers: int = 1
    on_error: OnError = "fail"
    compression: Compression = "same"
    """Of the output: that of each input, or none."""
    overwrite: bool = False
    """Replace the output of an earlier step."""
    max_line_bytes: int = MAX_LINE_BYTES
    block_bytes: int = BLOCK_BYTES
    """Bytes of text per block sent to a worker."""
    expanded: tuple[tuple[InputFile, ...], ...] = ()
    """The files of each input, as `check_step_files` has found them."""

    @property
    def sources(self) -> tuple[InputFile, ...]:
        """All files to read."""
        return tuple(chain.from_iterable(self.expanded))

    @property
    def read_options(self) -> ReadOptions:
        return ReadOptions(
            (self.json_key,),
            ID_KEY,
            all_keys=True,
            block_bytes=self.block_bytes,
            max_line_bytes=self.max_line_bytes,
        )

    def output_names(self) -> tuple[str, ...]:
        """Returns the path of each output in the folder: that of its input below the folder that all inputs share.

        >>> def names(paths, **options):
        ...     files = tuple(InputFile(path, form, 0, "") for path, form in paths)
        ...     return StepFiles(inputs=(), output="kept", expanded=(files,), **options).output_names()
        >>> names([("raw/web/0.jsonl", "jsonl"), ("raw/code/0.jsonl.gz", "jsonl")])
        ('web/0.jsonl', 'code/0.jsonl.gz')
        >>> names([("raw/0.parquet", "parquet"), ("raw/1.csv.zst", "csv"), ("raw/2.tgz", "webdataset"), ("raw/README", "text")])
        ('0.jsonl', '1.jsonl.zst', '2.jsonl.gz', 'README.jsonl')
        >>> names([("raw/0.jsonl.gz", "jsonl"), ("raw/1.tgz", "webdataset")], compression="none")
        ('0.jsonl', '1.jsonl')
        """
        paths = [_path_of(file) for file in self.sources]
        common = posixpath.commonpath([posixpath.dirname(path) for path in paths])
        names = (posixpath.relpath(path, common) for path in paths)
        return tuple(_output_name(name, file, self.compression) for name, file in zip(names, self.sources))


def check_step_files(files: StepFiles, *, step: str, parts: Sequence[str] = ("",)) -> StepFiles:
    """Returns the same with the files of the inputs; raises `DataError` with every problem of them, before any work is done.

    parts: the folders in the output that have a file for each input.
    """
    problems: list[str] = []
    expanded: list[tuple[InputFile, ...]] = []
    for name in files.inputs:
        try:
            expanded.append(tuple(expand_inputs([name], files.input_format)))
        except DataError as error:
            problems.append(str(error).removesuffix("."))
    files = replace(files, expanded=tuple(expanded))
    if not files.inputs:
        problems.append("no input is given (--input)")
    if files.workers < 1:
        problems.append(f"--workers {files.workers} must be at least 1")
    if files.max_line_bytes < 1:
        problems.append(f"--max-line-bytes {files.max_line_bytes} must be at least 1")
    if files.sources:
        problems += _name_problems(files, parts)
    output = os.path.realpath(files.output)
    local = [file.path for file in files.sources if not file.is_remote]
    inside = [path for path in local if os.path.realpath(path).startswith(f"{output}{os.sep}")]
    if inside:
        problems.append(f"--output {files.output} contains the input {inside[0]}; give another folder")
    if problems:
        raise DataError(f"Cannot {step}: {'; '.join(problems)}.")
    return files


def _name_problems(files: StepFiles, parts: Sequence[str]) -> list[str]:
    """Returns what is wrong with the names of the outputs: each must be that of one file."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for part in parts:
        for name, file in zip(files.output_names(), files.sources):
            paths[posixpath.join(part, name)].append(file.path)
    problems: list[str] = []
    for name, of_name in paths.items():
        distinct = [printable(path) for path in dict.fromkeys(of_name)]
        if name == SUMMARY_FILE:
            problems.append(
                f"input {distinct[0]} would be written as {name}, which is the file of the counts; rename it"
            )
        elif len(distinct) > 1:
            named = " and ".join(distinct[:2])
            problems.append(
                f"inputs {named} would both be written as {printable(name)}; rename one, or give it a step of its own"
            )
        elif len(of_name) > 1:
            problems.append(f"several inputs would be written as {printable(name)}; name each file once")
    return problems[:1]


def _path_of(file: InputFile) -> str:
    """Returns an absolute path for a file, of an address one that no file of this machine has."""
    if not file.is_remote:
        return os.path.abspath(file.path)
    protocol, _, path = file.path.partition("?")[0].partition("://")
    return posixpath.normpath(f"/{protocol}:/{path}")


def _output_name(name: str, file: InputFile, compression: Compression) -> str:
    """Returns the name of JSON lines; the one of another format loses its ending."""
    folder, slash, base = name.rpartition("/")
    ending, packed = name_endings(base)
    stem = base if packed is None else base[: -len(packed) - 1]
    if file.format != "jsonl":
        packed = "gz" if ending == "tgz" else packed
        stem = f"{stem[: -len(ending) - 1] if ending in DATA_ENDINGS else stem}.jsonl"
    elif packed is not None:
        packed = base[-len(packed) :]
    suffix = "" if packed is None or compression == "none" else f".{packed}"
    return f"{folder}{slash}{stem}{suffix}"
