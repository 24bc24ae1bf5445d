"""The record of communication keeps the latest events and counts all of them."""

import torch

from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import ParallelMesh


def test_ring_keeps_the_latest_and_counts_all():
    record = CommRecord(capacity=3)
    for size in range(5):
        record.add(ParallelMesh.single().tp, "all_reduce", elements=size, dtype=torch.bfloat16)
    assert record.count == 5
    assert [(event.sequence_number, event.elements, event.bytes) for event in record.events()] == [
        (3, 2, 4),
        (4, 3, 6),
        (5, 4, 8),
    ]
    assert [event.sequence_number for event in record.events(since=4)] == [5]
    assert record.events(since=record.count) == []
