"""An id beyond the vocabulary is named with its dataset, document and place, wherever it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data import indexed_dataset
from petatron.data.batch_loader import BatchLoader, LoaderOptions
from petatron.data.build_datasets import build_datasets
from petatron.data.check_token_ids import scan_ids
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import HEADER, IndexedDataset
from petatron.data.indexed_writer import IndexedWriter

from .conftest import MakeDataset
from .test_build import run_config

NUM_DOCUMENTS, LENGTH = 300, 40


def corpus(
    make_dataset: MakeDataset, bad: dict[int, int] | None = None, *, name: str = "data", dtype: str = "int32"
) -> str:
    """Documents of ids below 1000, and others at some places of the file."""
    tokens = np.random.default_rng(2).integers(0, 1000, NUM_DOCUMENTS * LENGTH)
    for place, number in (bad or {}).items():
        tokens[place] = number
    return make_dataset(tokens.reshape(NUM_DOCUMENTS, LENGTH).tolist(), name, dtype)


def no_start_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petatron.data.gpt_dataset.check_some_ids", lambda *_: None)


@pytest.mark.parametrize("number", [1000, 2**31 - 1, -1])
def test_a_batch_with_such_an_id_is_refused_wherever_it_is(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    no_start_check(monkeypatch)
    for place in np.random.default_rng(number & 0xFFFF).integers(0, NUM_DOCUMENTS * LENGTH, 4).tolist():
        prefix, good = corpus(make_dataset, {place: number}), corpus(make_dataset, name="good")
        config = run_config(tmp_path, data_path=("1", good, "1", prefix), split="1")
        dataset = build_datasets(config, None, (2 * NUM_DOCUMENTS * LENGTH // 8 + 8, 0, 0)).train
        assert dataset is not None
        loader = BatchLoader(dataset, LoaderOptions(micro_batch_size=4, seed=1, seq_length=8, vocab_size=1000))
        document, position = divmod(place, LENGTH)
        text = rf"data: document {document}, token {position}, has the id {number}, but the vocabulary has 1000 ids.*\(Samples "
        with pytest.raises(DataError, match=text):
            for step in range(len(dataset) // 4):
                loader.next_step(4, 4 * step)


def test_no_read_of_good_ids_is_refused(make_dataset: MakeDataset, tmp_path: Path) -> None:
    config = run_config(tmp_path, data_path=(corpus(make_dataset, {5: 999}),), split="1")
    dataset = build_datasets(config, None, (NUM_DOCUMENTS * LENGTH // 8 - 1, 0, 0)).train
    assert isinstance(dataset, GPTDataset) and max(int(dataset[index].max()) for index in range(len(dataset))) == 999


def test_a_scan_finds_the_first_and_counts_all(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "_BLOCK_TOKENS", 100)
    random = np.random.default_rng(3)
    for _ in range(20):
        bad = {int(place): int(random.integers(1000, 5000)) for place in random.integers(0, NUM_DOCUMENTS * LENGTH, 3)}
        progress: list[tuple[int, int]] = []
        ids = scan_ids(IndexedDataset(corpus(make_dataset, bad)), 1000, lambda *counts, to=progress: to.append(counts))
        assert ids.first_beyond is not None and ids.num_beyond == len(bad) and ids.high == max(bad.values())
        number, place = ids.first_beyond
        assert (place.document, place.position) == divmod(min(bad), LENGTH) and number == bad[min(bad)]
        assert progress[-1] == (NUM_DOCUMENTS * LENGTH,) * 2
    assert scan_ids(IndexedDataset(corpus(make_dataset)), 1000).problem("x", 1000) is None


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document([1, 2, 3], [1, 2])
        writer.add_document([], [0, 0])
        writer.add_document([4, 5, 900], [2, 1])
    first = scan_ids(IndexedDataset(tmp_path / "data"), 900).first_beyond
    assert first is not None and str(first[1]) == "document 2, sequence 5, token 0"


def test_sequences_that_do_not_follow_one_another(make_dataset: MakeDataset) -> None:
    """The format allows any order of sequences in the file."""
    prefix = make_dataset([[1, 2], [3, 4], [5, 900], [7, 8]])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    start = HEADER.size + 4 * 4
    offsets = np.frombuffer(index, "<i8", 4, start).copy()
    index[start : start + 32] = offsets[[2, 0, 3, 1]].tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    dataset = IndexedDataset(prefix)
    assert [ids.tolist() for _, ids in dataset.blocks()] == [[5, 900], [1, 2], [7, 8], [3, 4]]
    first = scan_ids(dataset, 900).first_beyond
    assert first is not None and str(first[1]) == "document 0, token 1"


def test_inspect_reads_every_id(make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = corpus(make_dataset, {7777: 1000, 9000: 2000})
    assert main(["data", "inspect", prefix, "--vocab-size", "3000"]) == 0
    assert "token ids          0 to 2,000" in capsys.readouterr().out
    assert main(["data", "inspect", prefix, "--vocab-size", "1000"]) == 1
    document, position = divmod(7777, LENGTH)
    error = capsys.readouterr().err
    assert "2 tokens of the file exceed it" in error
    assert f"data: document {document}, token {position}, has the id 1000, and the vocabulary has" in error
    assert main(["data", "inspect", prefix, "--tokenizer-type", "ByteTokenizer"]) == 1
    capsys.readouterr()
    assert main(["data", "inspect", prefix, "--vocab-size", "1000", "--no-check-ids"]) == 0
    assert "token ids" not in capsys.readouterr().out
