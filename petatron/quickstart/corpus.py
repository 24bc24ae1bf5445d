"""The quickstart's corpus, which is on every machine: the source files of Python's own standard library.

Real text of about ten megabytes, written by people, without a download. Excluded are folders of tests, which repeat
themselves, and of generated tables. Files are chosen, and held out for evaluation, by a hash of their path: the choice
does not depend on the order of the file system, spreads over all packages, and stays when other files come or go.
Whole files are held out, because a model that has seen one half of a file knows much of the other.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic
from petatron.base.untrusted_files import read_limited_bytes

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_INTERVAL = 20
_MAX_FILE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file's path relative to the corpus folder, with forward slashes, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files to train on and files to evaluate on, each sorted by path."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    @property
    def digest(self) -> str:
        """Changes when any text, or its split, does."""
        hasher = hashlib.blake2b(digest_size=16)
        for name, files in (("train", self.train), ("held out", self.held_out)):
            for file in files:
                hasher.update(json.dumps([name, file.path, file.text]).encode())
        return hasher.hexdigest()


def standard_library() -> Path:
    """Returns the folder of the running Python's library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(folder: Path, *, max_bytes: int, min_files: int = 200) -> Corpus:
    """Reads up to `max_bytes` of Python source below a folder, divided into training and held-out files."""
    chosen: list[SourceFile] = []
    total = 0
    for path in sorted(_candidates(folder), key=_path_hash):
        text = _read(folder / path)
        size = len(text.encode()) if text else 0
        if size == 0 or total + size > max_bytes:
            continue
        chosen.append(SourceFile(path, text))
        total += size
    if len(chosen) < min_files:
        raise DataError(
            f"Only {len(chosen)} readable Python files lie in {folder}, and {min_files} are needed for a corpus. Some "
            "installations of Python keep their library in an archive; use a Python from python.org, a package manager or conda."
        )
    chosen.sort(key=lambda file: file.path)
    held_out = [file for file in chosen if is_held_out(file.path)]
    return Corpus(tuple(file for file in chosen if not is_held_out(file.path)), tuple(held_out))


def is_held_out(path: str) -> bool:
    """Selects one file in twenty."""
    return _path_hash(path) % HELD_OUT_INTERVAL == 0


def write_jsonl(files: Sequence[SourceFile], destination: Path) -> None:
    """Writes one JSON object per file with its path and text, as `petatron data preprocess` reads them."""
    lines = (json.dumps({"path": file.path, "text": file.text}) + "\n" for file in files)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(destination, "".join(lines))
    except OSError as error:
        raise DataError(f"Cannot write the corpus to {destination}: {error}. Choose a writable folder.") from error


def _candidates(folder: Path) -> Iterator[str]:
    """Yields Python files below a folder by relative path; excluded folders are not entered."""
    pending = [folder]
    while pending:
        try:
            entries = list(pending.pop().iterdir())
        except OSError:  # a folder that may not be read, or a library that is not a folder
            continue
        for entry in entries:
            if entry.is_dir():
                if entry.name not in EXCLUDED_FOLDERS and not entry.is_symlink():
                    pending.append(entry)
            elif entry.suffix == ".py":
                yield entry.relative_to(folder).as_posix()


def _path_hash(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big")


def _read(path: Path) -> str:
    """The text of a file; empty when it cannot be read or is not UTF-8."""
    try:
        return read_limited_bytes(path, _MAX_FILE_BYTES).decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return ""
