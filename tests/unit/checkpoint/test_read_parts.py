"""How reading threads share a file: consecutive blocks, each through a descriptor of its own, until one of them fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from petatron.checkpoint.files.step_list import DamagedCheckpointError
from petatron.checkpoint.load import reshard_reads
from petatron.checkpoint.load.reshard_reads import _contiguous_parts, _read_in_order, _ReadBlock

BLOCKS = [_ReadBlock(at, at + 4, None, []) for at in range(0, 40, 4)]


@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_parts_are_consecutive_and_cover_all_blocks(count: int):
    parts = list(_contiguous_parts(BLOCKS, count))
    assert [block for part in parts for block in part] == BLOCKS
    assert len(parts) == min(count, 10) and all(parts) and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert list(_contiguous_parts([], count)) == []


def test_a_thread_that_fails_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(30))
    read: list[int] = []
    original = reshard_reads._read_block

    def recorded(path: Path, descriptor: int, block: _ReadBlock, buffers: threading.local) -> None:
        original(path, descriptor, block, buffers)
        read.append(block.begin)

    monkeypatch.setattr(reshard_reads, "_read_block", recorded)
    failed = threading.Event()
    with pytest.raises(DamagedCheckpointError, match="ends before all of it was read"):
        _read_in_order(path, BLOCKS, threading.local(), failed)
    assert failed.is_set() and read == list(range(0, 28, 4))
    read.clear()
    _read_in_order(path, BLOCKS, threading.local(), failed)
    assert read == []
