"""The content of an index is read once per node, and again when it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.base.errors import DataError
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train import check_and_open_run
from tests.dist import RankPool

from .conftest import MakeDataset

DOCUMENTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
HOUR_AGO_NS = 3_600_000_000_000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The indices whose content was read."""
    seen: list[str] = []
    whole = IndexedDataset._hash

    def noted(self: IndexedDataset, tokens: str) -> str:
        seen.append(self.idx.name)
        return whole(self, tokens)

    monkeypatch.setattr(IndexedDataset, "_hash", noted)
    return seen


def age(prefix: str) -> None:
    index = Path(f"{prefix}.idx")
    then = index.stat().st_mtime_ns - HOUR_AGO_NS
    os.utime(index, ns=(then, then))


def test_a_second_rank_does_not_read_the_content_again(make_dataset: MakeDataset, tmp_path: Path, read: list[str]):
    prefix, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    age(prefix)
    first = IndexedDataset(prefix)
    digest = first.digest(cache)
    assert first.digest(cache) == IndexedDataset(prefix).digest(cache) == digest
    assert read == ["data.idx"]
    assert IndexedDataset(prefix).digest() == digest, "without a folder it is the same and is read"
    assert len(read) == 2
    GPTDataset(IndexedDataset(prefix), range(2), num_samples=None, seq_length=2, seed=1, cache_dir=cache)
    assert len(read) == 2


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_changed_file_is_read_again(make_dataset: MakeDataset, tmp_path: Path, read: list[str], keeps_times: bool):
    prefix, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    age(prefix)
    before = os.stat(f"{prefix}.idx")
    digest = IndexedDataset(prefix).digest(cache)
    make_dataset([DOCUMENTS[0][:-1], [8, *DOCUMENTS[1]]])  # as many bytes in both files
    if keeps_times:
        os.utime(f"{prefix}.idx", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(f"{prefix}.idx").st_size == before.st_size
    assert IndexedDataset(prefix).digest(cache) != digest
    assert len(read) == 2


def test_other_tokens_are_another_dataset(make_dataset: MakeDataset, tmp_path: Path, read: list[str]):
    prefix, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    age(prefix)
    digest = IndexedDataset(prefix).digest(cache)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    assert IndexedDataset(prefix).digest(cache) != digest
    assert len(read) == 2


def test_a_file_that_is_just_being_written_is_not_remembered(
    make_dataset: MakeDataset, tmp_path: Path, read: list[str]
):
    prefix, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    future = os.stat(f"{prefix}.idx").st_mtime_ns + HOUR_AGO_NS
    os.utime(f"{prefix}.idx", ns=(future, future))
    assert IndexedDataset(prefix).digest(cache) == IndexedDataset(prefix).digest(cache)
    assert len(read) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"file": 3}', '{"file": [1], "subject": "x", "digest": 5}', "\xff"])
def test_a_damaged_record_is_made_again(make_dataset: MakeDataset, tmp_path: Path, read: list[str], content: str):
    prefix, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    age(prefix)
    digest = IndexedDataset(prefix).digest(cache)
    (kept,) = cache.glob("*-digest.json")
    kept.write_text(content, encoding="latin-1")
    assert IndexedDataset(prefix).digest(cache) == digest == IndexedDataset(prefix).digest(cache)
    assert len(read) == 2


def test_a_folder_that_cannot_be_written_costs_only_time(make_dataset: MakeDataset, tmp_path: Path, read: list[str]):
    prefix = make_dataset(DOCUMENTS)
    age(prefix)
    (tmp_path / "file").write_text("")
    assert IndexedDataset(prefix).digest(tmp_path / "file" / "cache") == IndexedDataset(prefix).digest()
    assert len(read) == 2


def _turns(folder: str, fails: int | None) -> list[str]:
    """Two nodes of two ranks: which had built when this rank began."""
    rank = dist.get_rank()
    mesh = ParallelMesh(Layout(dp_shard=4), rank)

    def build() -> list[str]:
        if rank == fails:
            raise DataError(f"rank {rank} has no data")
        there = sorted(path.name for path in Path(folder).iterdir())
        (Path(folder) / str(rank)).touch()
        return there

    try:
        return check_and_open_run._build_on_rank_zero_first(mesh.control, build, local_rank=rank % 2)
    except DataError as error:
        return [str(error)]


def test_one_rank_then_one_of_each_node_then_the_rest(ranks: RankPool, tmp_path: Path):
    zero, one, two, three = ranks.run(_turns, 4, str(tmp_path), None)
    assert (zero, two) == ([], ["0"])
    assert {"0", "2"} <= set(one) and {"0", "2"} <= set(three)


@pytest.mark.parametrize("fails", [0, 2])
def test_a_node_without_data_ends_all(ranks: RankPool, tmp_path: Path, fails: int):
    assert ranks.run(_turns, 4, str(tmp_path), fails) == [[f"rank {fails} has no data"]] * 4
