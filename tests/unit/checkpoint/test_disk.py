"""Files as they are written: their digests by block, and failures on the way to the device."""

import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files import digested_file_io as disk_module
from petatron.checkpoint.files.digested_file_io import Disk, StoredFile, digest_file
from petatron.checkpoint.save.rank_writer import check_free_space


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(disk_module, "BLOCK_BYTES", 16)
    monkeypatch.setattr(disk_module, "_FLUSH_BYTES", 32)


def _expected(content: bytes) -> StoredFile:
    blocks = [content[at : at + 16] for at in range(0, len(content), 16)]
    return StoredFile(len(content), tuple(map(_folded, blocks)))


def _folded(block: bytes) -> str:
    """The digest byte by byte, as docs/checkpoint-format.md has it."""
    found = ""
    for period in (8192, 8191):
        fold = bytearray(period)
        for at, value in enumerate(block):
            fold[at % period] ^= value
        found += f"{zlib.crc32(bytes(fold) + len(block).to_bytes(8, 'little')):08x}"
    return found


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 70), max_size=6))
def test_digests_do_not_depend_on_how_a_file_is_handed_over(sizes, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "BLOCK_BYTES", 16)
        patch.setattr(disk_module, "_FLUSH_BYTES", 32)
        parts = [bytes(number % 251 for number in range(at, at + size)) for at, size in enumerate(sizes)]
        path = tmp_path_factory.mktemp("disk") / "file"
        stored = Disk().write(path, parts)
        assert path.read_bytes() == b"".join(parts)
        assert stored == _expected(b"".join(parts)) == digest_file(path)


def test_a_write_that_fails_on_its_way_to_the_device_is_an_error(small_blocks, tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        Disk().write(tmp_path / "file", [bytes(16)] * 20)


def test_every_trace_on_disk_is_announced(small_blocks, tmp_path):
    class Listening(Disk):
        def __init__(self):
            self.heard = []

        def failpoint(self, event, path):
            self.heard.append((event, path.name))

    disk = Listening()
    disk.make_folder(tmp_path / "a")
    disk.write(tmp_path / "a" / "f", [bytes(20)])
    disk.rename(tmp_path / "a", tmp_path / "b")
    disk.sync_folder(tmp_path)
    disk.remove(tmp_path / "b")
    assert disk.heard == [
        ("folder made", "a"),
        *[("opened", "f"), ("written", "f"), ("written", "f"), ("synced", "f")],
        *[("renaming", "a"), ("renamed", "b")],
        ("folder synced", tmp_path.name),
        *[("removed", "f"), ("removed", "b")],
    ]


def test_room_is_asked_for_before_anything_is_written(tmp_path):
    check_free_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(
        CheckpointError, match=r"needs 9,[\d.,]+ TB, and the disk of .* has [\d.]+ [kMGT]B left\. Free space"
    ):
        check_free_space(tmp_path, 9 * 10**15)
