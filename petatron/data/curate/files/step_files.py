"""What every curation step is told of its files, and the checks of that before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from petatron.base.errors import DataError
from petatron.base.untrusted_files import not_a_file_reason
from petatron.data.inputs.line_blocks import BLOCK_BYTES, MAX_LINE_BYTES

OnError = Literal["fail", "skip"]
Compression = Literal["same", "none"]
COMPRESSIONS: tuple[Compression, ...] = ("same", "none")
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """JSON lines to read, and the folder to write."""

    inputs: tuple[str, ...]
    output: str
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

    def output_names(self) -> tuple[str, ...]:
        """Returns the path of each output in the folder: that of its input below the folder that all inputs share.

        >>> StepFiles(inputs=("raw/web/0.jsonl", "raw/code/0.jsonl.gz"), output="kept").output_names()
        ('web/0.jsonl', 'code/0.jsonl.gz')
        >>> StepFiles(inputs=("raw/web/0.jsonl.gz",), output="kept", compression="none").output_names()
        ('0.jsonl',)
        """
        paths = [os.path.abspath(path) for path in self.inputs]
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = (os.path.relpath(path, common) for path in paths)
        return tuple(map(_plain_name, names)) if self.compression == "none" else tuple(names)


def check_step_files(files: StepFiles, *, step: str) -> None:
    """Raises `DataError` with every problem of the files, before any work is done."""
    problems = [f"input {path} {why}" for path in files.inputs if (why := not_a_file_reason(Path(path))) is not None]
    if not files.inputs:
        problems.append("no input is given (--input)")
    if files.workers < 1:
        problems.append(f"--workers {files.workers} must be at least 1")
    if files.max_line_bytes < 1:
        problems.append(f"--max-line-bytes {files.max_line_bytes} must be at least 1")
    if files.inputs and len(set(names := files.output_names())) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problems.append(f"several inputs would be written as {twice}; name each file once")
    output = os.path.realpath(files.output)
    inside = [path for path in files.inputs if os.path.realpath(path).startswith(f"{output}{os.sep}")]
    if inside:
        problems.append(f"--output {files.output} contains the input {inside[0]}; give another folder")
    if problems:
        raise DataError(f"Cannot {step}: {'; '.join(problems)}.")


def _plain_name(name: str) -> str:
    suffix = next((ending for ending in _COMPRESSED_SUFFIXES if name.endswith(ending)), "")
    return name.removesuffix(suffix)
