"""Outputs are found by all that a model reads of a text, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from petatron.base.errors import DataError
from petatron.data.packed_segments import PackedSegment, make_segment_batch
from petatron.data.stored_outputs import StoredOutputs, StoredOutputsWriter, batch_extension, unit_keys
from petatron.models.batch import Batch

TEXT = torch.tensor([[5, 6, 7], [8, 9, 1]])


def keys(**arrays: torch.Tensor) -> list[bytes]:
    return unit_keys(Batch(arrays={"tokens": TEXT, **arrays}), "row")


def test_rows_are_told_apart_by_what_a_model_reads():
    assert keys(labels=TEXT, loss_mask=torch.ones(2, 3)) == keys() == keys(positions=torch.arange(3))
    others = (
        keys(positions=torch.zeros(2, 3)),
        keys(source=torch.tensor([[1], [1]])),
        keys(source=torch.tensor([[1], [2]])),
    )
    assert len({key for rows in (keys(), *others) for key in rows}) == 7, "the first rows of the last two are alike"
    with pytest.raises(DataError, match="'patches' of a batch has 7 entries for 2 rows"):
        keys(patches=torch.zeros(7, 4))


def segment(*ids: int, learned: int = 1) -> PackedSegment:
    mask = np.array([0] * (len(ids) - learned) + [1] * learned)
    return PackedSegment(np.array(ids), mask)


def test_segments_are_found_in_any_row():
    a, b, c = segment(1, 2, 3), segment(1, 2, 4), segment(1, 2, 3, learned=2)
    first = unit_keys(make_segment_batch([[a, b], [c]], 6), "segment")
    second = unit_keys(make_segment_batch([[c, a, b]], 9), "segment")
    assert second == [first[2], first[0], first[1]] and len(set(first)) == 3


def test_parts_are_written_when_there_is_enough_of_them(tmp_path: Path):
    store = StoredOutputs(tmp_path / "stored", {"format": 1})
    store.create()
    writer = StoredOutputsWriter(store, part_bytes=100)
    values = np.arange(40, dtype=np.float64).reshape(20, 2)
    names = [bytes([number]) * 16 for number in range(20)]
    for place in range(20):
        writer.add(names[place : place + 1], {"values": values[place : place + 1]})
        writer.add(names[:1], {"values": values[5:6]})  # it is there already
    writer.flush()
    store.read_parts()
    assert len(list(store.folder.glob("*-keys.npy"))) == 3 and len(store) == 20
    again = StoredOutputs.open(store.folder)
    assert np.array_equal(again.arrays(names[::-1], ["values"])["values"], values[::-1])
    assert again.description == {"format": 1}


def test_a_batch_gets_the_arrays_of_its_rows(tmp_path: Path):
    store = StoredOutputs(tmp_path, {})
    store.write_part(unit_keys(Batch(TEXT), "row"), {"scores": np.array([[1.0, 2, 3], [4, 5, 6]])})
    store.read_parts()
    extended = batch_extension(store, "row", ["scores"])(Batch(TEXT.flip(0)))
    assert extended["scores"].tolist() == [[4, 5, 6], [1, 2, 3]] and extended.sequence_dim("scores") == 1
    with pytest.raises(DataError, match="has no outputs for 1 of 2 texts"):
        batch_extension(store, "row", ["scores"])(Batch(TEXT + torch.tensor([[0], [1]])))
