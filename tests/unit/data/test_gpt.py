from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.data import gpt_dataset
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from petatron.data.train_valid_test_split import split_units

from .conftest import MakeDataset

# Token ids are unique over the file, so a sample shows where its tokens come from.
DOCUMENTS = [
    list(range(start, start + length)) for start, length in ((0, 5), (5, 1), (6, 0), (6, 20), (26, 3), (29, 11))
]


def samples(dataset: GPTDataset) -> list[list[int]]:
    return [dataset[i].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("seq_length", [1, 2, 4, 7, 39])
def test_samples_are_windows_of_shuffled_documents(make_dataset: MakeDataset, seq_length: int) -> None:
    indexed = IndexedDataset(make_dataset(DOCUMENTS))
    dataset = GPTDataset(indexed, range(6), num_samples=None, seq_length=seq_length, seed=5)
    stream = [token for document in dataset._document_index for token in DOCUMENTS[document]]
    expected = [stream[k * seq_length : (k + 1) * seq_length + 1] for k in range((len(stream) - 1) // seq_length)]
    assert sorted(samples(dataset)) == sorted(expected)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [expected[k] for k in dataset._shuffle_index]
    assert dataset[0].dtype == np.int64


def test_sequences_of_a_document_are_shuffled_one_by_one(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document([1, 2, 3, 4, 5], [2, 3])
        writer.add_document([6, 7, 8, 9], [1, 3])
    orders = set()
    for seed in range(20):
        dataset = GPTDataset(IndexedDataset(tmp_path / "x"), range(4), num_samples=None, seq_length=8, seed=seed)
        [sample] = samples(dataset)
        assert sorted(sample) == list(range(1, 10))
        orders.add(tuple(sample))
    assert any(order.index(1) > order.index(6) > order.index(3) for order in orders), (
        "between two of the other document"
    )


def test_only_documents_of_the_split_are_used(make_dataset: MakeDataset) -> None:
    indexed = IndexedDataset(make_dataset(DOCUMENTS))
    dataset = GPTDataset(indexed, range(3, 5), num_samples=50, seq_length=4, seed=5)
    assert {token for sample in samples(dataset) for token in sample} == set(range(6, 29))
    assert len(dataset) >= 50


def test_a_split_without_tokens_is_an_error(make_dataset: MakeDataset) -> None:
    indexed = IndexedDataset(make_dataset(DOCUMENTS))
    with pytest.raises(DataError, match=r"documents 2\.\.3 hold no tokens"):
        GPTDataset(indexed, range(2, 3), num_samples=1, seq_length=4, seed=5)


def test_cache_is_used_and_keyed_by_content(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("petatron.data.index_cache.MIN_RECORDED_BYTES", 0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def build(seed: int = 1, num_samples: int = 9, prefix: str | None = None) -> list[list[int]]:
        indexed = IndexedDataset(prefix or make_dataset(DOCUMENTS))
        return samples(GPTDataset(indexed, range(6), num_samples=num_samples, seq_length=4, seed=seed, cache_dir=cache))

    first = build()
    kept = [path.suffix for path in cache.iterdir() if not path.name.endswith("-digest.json")]
    assert sorted(kept) == [".json", ".npy", ".npy", ".npy"]
    built: list[int] = []
    original = gpt_dataset.build_sample_indices
    monkeypatch.setattr(
        gpt_dataset, "build_sample_indices", lambda *args, **options: (built.append(1), original(*args, **options))[1]
    )
    assert build() == first and build(num_samples=8) == first and not built  # rewritten files, same content: found
    assert build(seed=2) != first and len(built) == 1
    build(num_samples=11)  # a second epoch
    build(prefix=make_dataset([*DOCUMENTS, [40]]))
    assert len(built) == 3


def test_a_damaged_cache_is_built_again(make_dataset: MakeDataset, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    indexed = IndexedDataset(make_dataset(DOCUMENTS))
    first = samples(GPTDataset(indexed, range(6), num_samples=9, seq_length=4, seed=1, cache_dir=cache))
    for path in cache.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-3])
    assert samples(GPTDataset(indexed, range(6), num_samples=9, seq_length=4, seed=1, cache_dir=cache)) == first


def test_unwritable_cache_falls_back_to_memory(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    indexed = IndexedDataset(make_dataset(DOCUMENTS))
    dataset = GPTDataset(indexed, range(6), num_samples=9, seq_length=4, seed=1, cache_dir=tmp_path / "file" / "cache")
    assert len(samples(dataset)) == len(dataset)
    assert "cannot be kept in" in caplog.text and "--data-cache-path" in caplog.text


def test_concurrent_builders_agree(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = make_dataset(DOCUMENTS)
    results: list[list[list[int]]] = []

    def work() -> None:
        indexed = IndexedDataset(prefix)
        dataset = GPTDataset(indexed, range(6), num_samples=9, seq_length=4, seed=1, cache_dir=tmp_path / "cache")
        results.append(samples(dataset))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(result == results[0] for result in results)
    assert not list((tmp_path / "cache").glob("*.tmp"))


@settings(max_examples=100, deadline=None)
@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), documents=st.integers(0, 10**6))
def test_split_covers_all_documents(shares: list[int], documents: int) -> None:
    ranges = split_units(",".join(map(str, shares)), documents)
    assert ranges[0].start == 0 and ranges[2].stop == documents
    assert ranges[0].stop == ranges[1].start and ranges[1].stop == ranges[2].start
    for share, part in zip([*shares, 0, 0], ranges):
        assert abs(len(part) - documents * share / sum(shares)) <= 1


def test_split_values() -> None:
    assert split_units("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    assert split_units("0.9, 0.1", 10) == (range(9), range(9, 10), range(10, 10))
    for bad in ("", "a,b", "1,-1", "0,0,0", "1,2,3,4", "nan,1", "inf,1"):
        with pytest.raises(ConfigError, match="--split"):
            split_units(bad, 10)


def test_a_large_index_is_announced_and_one_beyond_memory_refused(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    indexed = IndexedDataset(make_dataset(DOCUMENTS))

    def build(num_samples: int) -> list[list[int]]:
        return samples(GPTDataset(indexed, range(6), num_samples=num_samples, seq_length=4, seed=5))

    quiet = build(30)
    monkeypatch.setattr(gpt_dataset, "_ANNOUNCED_ENTRIES", 1)
    with caplog.at_level("INFO", logger="petatron"):
        monkeypatch.setattr(logging.getLogger("petatron"), "propagate", True)
        assert build(30) == quiet
    lines = [record.getMessage() for record in caplog.records]
    assert "the order of 39 samples over 4 epochs takes about 0 s to build" in lines[0]
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "documents are shuffled",
        "samples are cut",
        "samples are shuffled",
    ]
    monkeypatch.setattr(gpt_dataset, "host_memory_bytes", lambda: 100)
    with pytest.raises(DataError, match=r"over 4 epochs takes .* B, and this machine has 100 B\. Train for fewer"):
        build(30)
