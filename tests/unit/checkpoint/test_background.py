"""Saves in the background: a copy of the moment, one at a time, failures that are told, and pruning after publishing."""

import threading

import pytest
import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.files.step_folder import list_steps
from petatron.checkpoint.manager import CheckpointManager, Retention
from petatron.checkpoint.save.async_save import StagingBuffer
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from tests.load_deadline import scaled


class Gate(Disk):
    """Writes nothing until it is opened; can refuse."""

    def __init__(self):
        self.open, self.waiting, self.refusal = threading.Event(), threading.Event(), None

    def write(self, path, parts):
        self.waiting.set()
        assert self.open.wait(scaled(20))
        if self.refusal is not None:
            raise self.refusal
        return super().write(path, parts)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def manager(tmp_path, gate):
    return CheckpointManager(tmp_path, ParallelMesh.single().world, disk=gate)


def _start(manager, weight, step=1, facts=None):
    chunk = Chunk("model/w", tuple(weight.shape), (0,) * weight.dim(), weight)
    manager.save(step, [chunk], metadata=facts or {}, same_layout_key="one", wait=False)


def _loaded(manager, step):
    weight = torch.zeros(4)
    found = manager.load(step, [Chunk("model/w", (4,), (0,), weight)])
    return weight.tolist(), found.metadata


def test_what_is_saved_is_the_moment_of_the_call(manager, gate, tmp_path):
    weight, facts = torch.ones(4), {"list": [1]}
    _start(manager, weight, facts=facts)
    assert gate.waiting.wait(scaled(20)) and manager.is_saving and not list_steps(tmp_path)
    weight.fill_(9.0)
    facts["list"].append(2)
    gate.open.set()
    manager.drain()
    assert not manager.is_saving
    assert _loaded(manager, 1) == ([1.0] * 4, {"list": [1]})


def test_never_two_in_flight(manager, gate, tmp_path):
    _start(manager, torch.ones(4), step=1)
    assert gate.waiting.wait(scaled(20))
    second = threading.Thread(target=lambda: _start(manager, torch.full((4,), 2.0), step=2))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save waits for the first"
    gate.open.set()
    second.join(scaled(20))
    assert not second.is_alive() and list(list_steps(tmp_path))[:1] == [1]
    manager.drain()
    assert list(list_steps(tmp_path)) == [1, 2]


@pytest.mark.parametrize("told_by", ["drain", "the next save", "a load"])
def test_a_failure_is_told_once_and_the_next_save_works(manager, gate, tmp_path, told_by):
    gate.open.set()
    gate.refusal = OSError(28, "No space left on device")
    _start(manager, torch.ones(4), step=1)
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved.*No space left.*earlier checkpoints are"):
        if told_by == "drain":
            manager.drain()
        elif told_by == "a load":
            manager.load(None, [])
        else:
            _start(manager, torch.ones(4), step=2)
    gate.refusal = None
    manager.drain()
    _start(manager, torch.ones(4), step=3)
    manager.drain()
    assert list(list_steps(tmp_path)) == [3] and not list(tmp_path.glob("*.tmp"))


def test_staging_keeps_its_memory_and_grows():
    staging = StagingBuffer()
    first = staging.stage({"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    assert first["a"].tolist() == [0.0, 1.0, 2.0] and first["b"].dtype == torch.bfloat16
    place = first["a"].data_ptr()
    again = staging.stage({"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    assert again["a"].data_ptr() == place
    grown = staging.stage({"a": torch.arange(1000.0), "odd": torch.tensor([True]), "none": torch.empty(0)})
    assert grown["a"][-1] == 999 and grown["odd"].item() is True and grown["none"].shape == (0,)


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(), [2, 4, 6, 8, 10]),
        (Retention(keep=2), [8, 10]),
        (Retention(keep=1, retain_interval=4), [4, 8, 10]),
    ],
)
def test_old_steps_go_after_the_new_one_is_there(tmp_path, retention, left):
    manager = CheckpointManager(tmp_path, ParallelMesh.single().world, retention=retention)
    for step in (2, 4, 6, 8, 10):
        manager.save(step, [Chunk("model/w", (4,), (0,), torch.ones(4))], metadata={}, same_layout_key="one")
    assert list(list_steps(tmp_path)) == left
    assert manager.latest() == 10


def test_a_step_that_cannot_be_removed_does_not_stop_the_run(tmp_path, caplog):
    class Stubborn(Disk):
        def rename(self, old, new):
            if new.name.endswith(".pruned"):
                raise OSError(30, "Read-only file system")
            super().rename(old, new)

    manager = CheckpointManager(tmp_path, ParallelMesh.single().world, retention=Retention(keep=1), disk=Stubborn())
    for step in (1, 2):
        manager.save(step, [Chunk("model/w", (4,), (0,), torch.ones(4))], metadata={}, same_layout_key="one")
    assert "could not be removed: [Errno 30] Read-only file system" in caplog.text and manager.latest() == 2


def test_steps_ahead_do_not_count_as_kept(tmp_path):
    """After a fallback the newest step may be the damaged one; two sound ones are to be kept all the same."""
    chunk = Chunk("model/w", (4,), (0,), torch.ones(4))
    for step in (10, 20, 30):
        CheckpointManager(tmp_path, ParallelMesh.single().world).save(step, [chunk], metadata={}, same_layout_key="one")
    manager = CheckpointManager(tmp_path, ParallelMesh.single().world, retention=Retention(keep=2))
    manager.save(25, [chunk], metadata={}, same_layout_key="one")
    assert list(list_steps(tmp_path)) == [20, 25, 30]


def test_going_back_to_an_older_step_prunes_no_newer_ones(tmp_path):
    manager = CheckpointManager(tmp_path, ParallelMesh.single().world, retention=Retention(keep=1))
    chunk = Chunk("model/w", (4,), (0,), torch.ones(4))
    for step in (10, 5):
        manager.save(step, [chunk], metadata={}, same_layout_key="one")
    assert list(list_steps(tmp_path)) == [5, 10], "what lies ahead may be the branch someone wants back"
