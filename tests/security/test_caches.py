"""An index cache that came with somebody's data is believed only as far as it can be proven; anything less is built again."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from petatron.base.safe_files import private_folder
from petatron.data import gpt_dataset, index_cache
from petatron.data.blended_dataset import blend_indices, load_blend
from petatron.data.build_datasets import build_datasets
from petatron.data.document_sample_shuffle_index import build_sample_indices
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from petatron.validate import load_config
from tests.longform import diagonal
from tests.unit.data.conftest import fresh_logging

__all__ = ["fresh_logging"]  # a fixture for all tests here

LENGTHS = (5, 1, 0, 20, 3, 11, 40)
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        for number, length in enumerate(LENGTHS):
            writer.add_document(np.arange(length) + 100 * number)
    return IndexedDataset(tmp_path / "data")


def samples(indexed: IndexedDataset, folder: Path | None, num_samples: int = 30) -> list[list[int]]:
    """With 30 samples of 4 tokens there are two epochs, the second apart."""
    dataset = GPTDataset(indexed, range(7), num_samples=num_samples, seq_length=4, seed=3, cache_dir=folder)
    return [dataset[i].tolist() for i in range(len(dataset))]


def forge(folder: Path, name: str, change: Callable[[NDArray], NDArray]) -> None:
    (path,) = folder.glob(f"*-{name}.npy")
    np.save(path, change(np.load(path)))


def _at(index: object, value: int) -> Callable[[NDArray], NDArray]:
    def change(array: NDArray) -> NDArray:
        array[index] = value
        return array

    return change


FORGERIES: dict[str, tuple[str, Callable[[NDArray], NDArray], str]] = {
    "one sample for ever": ("order", np.zeros_like, "order differs"),
    "one sample twice": ("order", lambda a: np.append(a[:-1], a[-2]), "order differs"),
    "a sample that is not there": ("order", _at(0, 2**31), "order differs"),
    "epochs mixed": ("order", lambda a: a[::-1].copy(), "order differs"),
    "one document for ever": ("documents", np.zeros_like, "documents differs"),
    "a document before the first": ("documents", _at(1, -1), "documents differs"),
    "a document of another split": ("documents", _at(1, 7), "documents differs"),
    "documents of the last epoch moved": ("documents", lambda a: a[::-1].copy(), "documents differs"),
    "samples that all begin at 0": ("starts", np.zeros_like, "starts differs"),
    "a sample that begins later": ("starts", lambda a: np.add(a, [[0, 1]]), "starts differs"),
    "a sample before the first": ("starts", _at((1, 0), -1), "starts differs"),
    "a sample beyond the last": ("starts", _at((-1, 0), 2**31 - 1), "starts differs"),
    "too few": ("order", lambda a: a[:-1], "order differs"),
    "another type": ("order", lambda a: a.astype(np.int64), "order differs"),
    "numbers with a point": ("documents", lambda a: a.astype(np.float32), "documents differs"),
    "another order in memory": ("starts", np.asfortranarray, "not an array of plain numbers"),
    "one number": ("starts", lambda a: np.int32(3), "starts differs"),
}


@diagonal(3)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_sample_index_is_built_again(
    indexed: IndexedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    array, change, reason = FORGERIES[name]
    true, folder = samples(indexed, None), tmp_path / "cache"
    assert samples(indexed, folder) == true
    forge(folder, array, change)
    assert samples(indexed, folder) == true
    (message,) = caplog.messages
    assert str(folder) in message and "built again" in message
    assert re.search(reason, message), message
    caplog.clear()
    assert samples(indexed, folder) == true and not caplog.messages, "the forgery is replaced"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 an archive",
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 0xFFFF,
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (30,), }".ljust(117)
        + b"\n"
        + bytes(99),
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<u4', 'fortran_order': False, 'shape': (99999999999,), }".ljust(117)
        + b"\n"
        + bytes(99),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<u4', 'fortran_order': False, 'shape': (-1,), }".ljust(117) + b"\n",
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '\\\x18', 'fortran_order': False, 'shape': (1,), }".ljust(117)
        + b"\n",
    ],
    ids=["empty", "zip", "nested header", "pickled objects", "longer than the file", "negative", "escape"],
)
def test_what_is_no_array_is_built_again(
    indexed: IndexedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    true, folder = samples(indexed, None), tmp_path / "cache"
    samples(indexed, folder)
    (path,) = folder.glob("*-order.npy")
    path.write_bytes(content)
    with warnings.catch_warnings(record=True, action="always") as shown:
        assert samples(indexed, folder) == true and "built again" in caplog.text
    assert not shown, "Python's words about foreign bytes"


@pytest.mark.parametrize("suffix", ["-order.npy", "-digest.json"])
def test_a_fifo_in_a_cache_is_not_waited_for(indexed: IndexedDataset, tmp_path: Path, suffix: str) -> None:
    folder, then = tmp_path / "cache", os.stat(f"{indexed.prefix}.idx").st_mtime_ns - HOUR_NS
    os.utime(f"{indexed.prefix}.idx", ns=(then, then))
    true = samples(indexed, folder)
    (path,) = folder.glob(f"*{suffix}")
    path.unlink()
    os.mkfifo(path)
    assert samples(IndexedDataset(indexed.prefix), folder) == true


def test_a_link_in_a_cache_is_replaced_and_its_target_kept(indexed: IndexedDataset, tmp_path: Path) -> None:
    folder, precious = tmp_path / "cache", tmp_path / "precious"
    precious.write_text("mine")
    true = samples(indexed, folder)
    for path in folder.glob("*.npy"):
        path.unlink()
        path.symlink_to(precious)
    assert samples(indexed, folder) == true
    assert precious.read_text() == "mine" and not any(path.is_symlink() for path in folder.glob("*.npy"))


@diagonal(2)
@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda d, s: (np.zeros_like(d), s), "dataset differs"),
        (lambda d, s: (d, np.zeros_like(s)), "sample differs"),
        (lambda d, s: (np.zeros_like(d), np.arange(len(s))), "dataset and sample differ"),
        (lambda d, s: (np.append(d[:-1], np.int16(2)), s), "dataset differs"),
        (lambda d, s: (np.full_like(d, -1), s), "dataset differs"),
        (lambda d, s: (d[:-1], s), "dataset differs"),
        (lambda d, s: (d, s.astype(np.int32)), "sample differs"),
    ],
)
def test_a_forged_blend_is_built_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    forged: Callable[[NDArray, NDArray], tuple[NDArray, NDArray]],
    reason: str,
) -> None:
    monkeypatch.setattr(index_cache, "_COMPARED_ELEMENTS", 64)
    weights, true = (3.0, 1.0, 0.5), blend_indices((3.0, 1.0, 0.5), 600)
    first = load_blend(weights, 600, cache_dir=tmp_path)
    again = load_blend(weights, 600, cache_dir=tmp_path)
    assert not caplog.messages and all(map(np.array_equal, first, true)) and all(map(np.array_equal, again, true))
    for name, array in zip(("dataset", "sample"), forged(true[0].copy(), true[1].copy())):
        forge(tmp_path, name, lambda _, array=array: array)
    assert all(map(np.array_equal, load_blend(weights, 600, cache_dir=tmp_path), true))
    assert re.search(reason, caplog.text), caplog.text


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often arrays were built; even the smallest entry is worth a note."""
    done: list[str] = []

    def noted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *words, **options: (done.append(name), function(*words, **options))[1]

    monkeypatch.setattr(index_cache, "MIN_RECORDED_BYTES", 0)
    monkeypatch.setattr(gpt_dataset, "build_sample_indices", noted("built", build_sample_indices))
    return done


def test_what_this_user_built_is_not_read_again(
    indexed: IndexedDataset, tmp_path: Path, home: Path, checks: list[str]
) -> None:
    true = samples(indexed, tmp_path / "cache")
    assert samples(indexed, tmp_path / "cache") == true and checks == ["built"]
    assert (home / ".petatron" / "checked-indices").stat().st_mode & 0o077 == 0


def _copied(source: Path, target: Path) -> Path:
    """As it arrives from elsewhere, an hour ago."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_what_others_built_is_compared_once(
    indexed: IndexedDataset, tmp_path: Path, home: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true = samples(indexed, tmp_path / "cache")
    shipped = _copied(tmp_path / "cache", tmp_path / "shipped")
    assert samples(indexed, shipped) == samples(indexed, shipped) == true
    assert checks == ["built"] * 3, "a file that has just changed is not remembered"
    monkeypatch.setattr(index_cache, "_MIN_FILE_AGE_NS", 0)
    assert samples(indexed, shipped) == samples(indexed, shipped) == true
    assert checks == ["built"] * 4


def test_a_note_holds_only_for_the_very_files(
    indexed: IndexedDataset, tmp_path: Path, home: Path, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    true, folder = samples(indexed, tmp_path / "cache"), tmp_path / "cache"
    (path,) = folder.glob("*-order.npy")
    before = path.stat()
    with path.open("r+b") as file:  # in place, with the size, inode and date that it had
        file.seek(before.st_size - 8)
        file.write(bytes(8))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert samples(indexed, folder) == true
    assert checks == ["built"] * 2 and "order differs" in caplog.text


@pytest.mark.parametrize("spoil", ["open to others", "a link", "not json", "no home"])
def test_a_note_that_others_could_have_written_is_not_believed(
    indexed: IndexedDataset,
    tmp_path: Path,
    home: Path,
    checks: list[str],
    spoil: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true, folder = samples(indexed, tmp_path / "cache"), home / ".petatron" / "checked-indices"
    if spoil == "open to others":
        folder.chmod(0o770)
    elif spoil == "a link":
        folder.rename(home / "elsewhere")
        folder.symlink_to(home / "elsewhere")
    elif spoil == "not json":
        for path in folder.iterdir():
            path.write_text("[[")
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert samples(indexed, tmp_path / "cache") == true
    assert checks == ["built"] * 2
    assert spoil == "not json" or private_folder("checked-indices") is None


def test_a_note_shipped_beside_the_cache_means_nothing(
    indexed: IndexedDataset, tmp_path: Path, home: Path, checks: list[str]
) -> None:
    true = samples(indexed, tmp_path / "cache")
    shipped = _copied(tmp_path / "cache", tmp_path / "shipped")
    forge(shipped, "order", np.zeros_like)
    paths = sorted(shipped.glob("*.npy"))
    identities = [[path.stat().st_dev, *index_cache._file_identity(path)] for path in paths]
    for name in ("checked.json", *(f"{path.stem}.json" for path in paths)):
        (shipped / name).write_text(json.dumps(identities))
    assert samples(indexed, shipped) == true and checks == ["built"] * 2


def test_new_files_follow_the_umask(indexed: IndexedDataset, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        samples(indexed, tmp_path / "cache")
    finally:
        os.umask(before)
    modes: Sequence[int] = [path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()]
    assert modes and set(modes) == {0o640}


def test_a_header_that_is_no_python_is_built_again(indexed: IndexedDataset, tmp_path: Path) -> None:
    """numpy asks Python's tokenizer to mend old headers, and that has errors of its own."""
    before = samples(indexed, tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*.npy"):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"}", b"(", 1))
    assert samples(indexed, tmp_path / "cache") == before


def test_a_cache_folder_that_is_a_link_is_not_written_to(
    indexed: IndexedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    words = "--num-layers 1 --seq-length 4 --lr 1e-3 --train-iters 2 --vocab-size 900 --split 100,0,0 --tokenizer-type NullTokenizer"
    flags = [*words.split(), "--data-path", indexed.prefix]
    with caplog.at_level("WARNING", logger="petatron"):
        built = build_datasets(load_config(flags, preset="tiny-llama").config, None, (8, 0, 0)).train
    assert built is not None and len(built) >= 8
    assert "cache is a symbolic link" in caplog.text and "--data-cache-path" in caplog.text
    assert not list((tmp_path / "elsewhere").iterdir())
    flags += ["--data-cache-path", str(tmp_path / "elsewhere")]  # the user's own word
    build_datasets(load_config(flags, preset="tiny-llama").config, None, (8, 0, 0))
    assert list((tmp_path / "elsewhere").iterdir())
