"""The folder that a step writes: complete under its name, or not there at all.

Everything is written into a folder beside it, which gets the name when the last file is closed. An older output is replaced only if
`summary.json` says that a curation step wrote it.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from petatron.base.errors import DataError
from petatron.base.safe_files import create_file, make_folder, remove_tree, tmp_path_for
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.inputs.compressed_stream import Compression
from petatron.data.inputs.curation_output_folder import is_step_output


@contextmanager
def output_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder that takes the name of `path` at the end; removed if anything fails."""
    _check_replaceable(path, overwrite)
    temporary = tmp_path_for(path)
    try:
        make_folder(path.parent)
        temporary.mkdir()
        yield temporary
        _publish(temporary, path, overwrite)
    except OSError as error:
        raise DataError(
            f"--output {path} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    finally:
        remove_tree(temporary)


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir():
        raise DataError(f"--output {path} exists and is not a folder. Choose another.")
    if not any(path.iterdir()):
        return
    if not overwrite:
        raise DataError(f"--output {path} is not empty. Give another folder, or replace it with --overwrite.")
    if not is_step_output(path):
        raise DataError(
            f"--output {path} has files that no curation step wrote, so --overwrite does not replace it. Give another folder."
        )


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    if not (path.exists() and overwrite and any(path.iterdir())):
        temporary.rename(path)  # onto nothing, or onto an empty folder
        return
    older = tmp_path_for(path)
    path.rename(older)
    temporary.rename(path)
    remove_tree(older)


class OutputFiles:
    """The files of an output, one for each input, in each part of it; parts are written in the order of the inputs.

    A part is a folder in the folder; the only part of most steps is the folder itself, "".
    """

    def __init__(self, folder: Path, files: StepFiles, parts: Sequence[str] = ("",)) -> None:
        self._folder, self._files, self._parts = folder, files, parts
        self._names, self._index, self._open = files.output_names(), -1, dict[str, BinaryIO]()
        self._stack = ExitStack()

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._advance(len(self._files.sources) - 1)
        self._stack.close()

    def write(self, index: int, content: bytes, part: str = "") -> None:
        """Adds to the file of the input with this index."""
        self._advance(index)
        self._open[part].write(content)

    def _advance(self, index: int) -> None:
        """Closes the files of one input and opens those of the next, so that inputs without lines have a file too."""
        while self._index < index:
            self._stack.close()
            self._index += 1
            file, name = self._files.sources[self._index], self._names[self._index]
            compression = file.compression() if self._files.compression == "same" else None
            for part in self._parts:
                self._open[part] = self._stack.enter_context(_open_output(self._folder / part / name, compression))


@contextmanager
def _open_output(path: Path, compression: Compression | None) -> Iterator[BinaryIO]:
    """Opens a file of the folder for writing, and syncs it at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(create_file(path, buffering=1 << 16))
        with _compressed(file, compression) as stream:
            yield stream
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _compressed(file: BinaryIO, compression: Compression | None) -> Iterator[BinaryIO]:
    """Yields a stream that compresses what is written into a file."""
    stream: Any = nullcontext(file)
    if compression == "zst":
        import zstandard

        stream = zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False)
    elif compression == "gz":
        stream = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
    elif compression == "xz":
        stream = lzma.LZMAFile(file, "wb")  # noqa: SIM115  entered below
    elif compression == "bz2":
        stream = bz2.BZ2File(file, "wb")
    with stream as opened:
        yield opened
