"""The door through which files of others come in: one refusal for whatever goes wrong, and nothing that is no file is opened."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError

from petatron.base.errors import CheckpointError, DataError
from petatron.base.untrusted_files import open_regular_file, read_limited_bytes, read_limited_json, reading_untrusted

PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def refuse(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} {why}. Copy it again.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (MemoryError(), "needs more memory than there is"),
        (OverflowError("int too large"), "OverflowError: int too large"),
        (TypeError("x" * 10_000 + "\nmore"), "TypeError: x"),
        (KeyError("a"), "KeyError: 'a'"),
        (IndexError(), r"\(IndexError\)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "UnicodeDecodeError"),
        (struct.error("short"), "error: short"),
        (SafetensorError("header too small"), "SafetensorError: header too small"),
        (PanicException("called `Option::unwrap()` on a `None` value"), "PanicException: called"),
        (PermissionError(13, "Permission denied"), "read: Permission denied"),
        (AssertionError("ours"), "AssertionError: ours"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_goes_wrong_is_one_refusal(error: BaseException, words: str):
    said = rf"^model\.bin cannot be .*{words}.*\. Copy it again\.$"
    with pytest.raises(CheckpointError, match=said) as caught, reading_untrusted(Path("model.bin"), refuse):
        raise error
    assert caught.value.__cause__ is error and len(str(caught.value)) < 300


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), DataError("said already")])
def test_interrupts_and_our_own_errors_pass(error: BaseException):
    with pytest.raises(type(error)) as caught, reading_untrusted(Path("model.bin"), refuse):
        raise error
    assert caught.value is error


def test_only_files_are_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(OSError, match=", not a file"):
            open_regular_file(path)
    with pytest.raises(IsADirectoryError):
        open_regular_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "nothing")


def test_a_file_that_became_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between the look and the opening: neither waits nor reads."""
    (tmp_path / "file").touch()
    seen = os.stat(tmp_path / "file")
    (tmp_path / "file").unlink()
    os.mkfifo(tmp_path / "file")
    monkeypatch.setattr("petatron.base.untrusted_files.os.stat", lambda path, **options: seen)
    with pytest.raises(OSError, match=", not a file"):
        open_regular_file(tmp_path / "file")


def test_no_more_is_read_than_there_may_be(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345678")
    assert (
        read_limited_bytes(tmp_path / "file", 8) == b"12345678" and read_limited_json(tmp_path / "file", 8) == 12345678
    )
    with pytest.raises(OSError, match="it has 8 bytes, and such a file at most 7"):
        read_limited_bytes(tmp_path / "file", 7)
    with pytest.raises(OSError, match="its size changes"):
        read_limited_bytes(Path("/proc/self/stat"), 100)  # says that it is empty
