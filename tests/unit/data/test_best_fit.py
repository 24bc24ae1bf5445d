"""Best-fit packing: the bins, the samples, and runs on them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError, DataError
from petatron.cli.main import main
from petatron.data import best_fit_dataset
from petatron.data.batch_loader import LoaderOptions
from petatron.data.best_fit_dataset import BestFitDataset, build_packing, make_best_fit_batch
from petatron.data.best_fit_packing import cut_documents, pack_best_fit
from petatron.data.build_datasets import build_datasets
from petatron.data.documents_of_sample import trace_sample
from petatron.layers.attention import AttentionSpec
from petatron.models.registry import model_spec
from petatron.validate import load_config
from petatron.validate.layer_capabilities import check_training

from .conftest import MakeDataset
from .test_build import run_config


def best_fit_by_pieces(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit, one piece after the other: the lengths in each bin."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [content for content in bins if capacity - sum(content) >= length]
        if fitting:
            min(fitting, key=lambda content: capacity - sum(content)).append(length)
        else:
            bins.append([length])
    return bins


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_bins_are_those_of_best_fit(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    expected = best_fit_by_pieces(lengths, capacity)
    bins, count = pack_best_fit(np.array(lengths, np.int32), capacity)
    contents = [[length for length, number in zip(lengths, bins) if number == place] for place in range(count)]
    assert count == len(expected) and all(0 < sum(content) <= capacity for content in contents)
    assert Counter(map(sum, contents)) == Counter(map(sum, expected))


def test_pieces_predict_each_token_once() -> None:
    lengths = np.array([0, 1, 2, 5, 6, 7, 11, 16, 17])
    pieces = cut_documents(np.arange(9), lengths, 5)
    ends = np.minimum(lengths[pieces.documents], pieces.starts + 6)
    predicted = [
        (int(d), t) for d, start, end in zip(pieces.documents, pieces.starts, ends) for t in range(start + 1, end)
    ]
    assert sorted(predicted) == [(d, t) for d in range(9) for t in range(1, int(lengths[d]))]
    assert Counter(pieces.documents.tolist())[4] == 1, "six tokens are one sample of five predictions"


def packed(make_dataset: MakeDataset, tmp_path: Path, num_samples: int, **data: Any) -> BestFitDataset:
    random = np.random.default_rng(5)
    documents = [[*range(1 + 10 * n, 1 + 10 * n + int(random.integers(1, 9))), 0] for n in range(60)]
    documents[7] = [*range(700, 730), 0]
    prefix = make_dataset(documents, "packed")
    config = run_config(tmp_path, data_path=(prefix,), split="1", dataset_type="best-fit", **data)
    dataset = build_datasets(config, None, (num_samples, 0, 0)).train
    assert isinstance(dataset, BestFitDataset)
    return dataset


def test_an_epoch_has_every_prediction_once_and_cuts_no_document_that_fits(
    make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="petatron"):
        dataset = packed(make_dataset, tmp_path, 200)
    epoch = dataset.samples_per_epoch
    assert len(dataset) == 200 > 2 * epoch
    for first in (0, epoch):
        seen: Counter[tuple[int, int]] = Counter()
        for index in range(first, first + epoch):
            sample = dataset[index]
            batch = make_best_fit_batch([sample], LoaderOptions(micro_batch_size=1, seed=1))
            pairs = zip(batch.tokens[0].tolist(), batch.labels[0].tolist(), batch.loss_mask[0].tolist())
            seen.update((token, label) for token, label, mask in pairs if mask)
            for sequence, start, length in dataset.pieces(index):
                assert length == dataset.indexed.lengths[sequence] or sequence == 7, (sequence, start)
        expected = Counter(
            pair
            for n in range(60)
            for pair in zip(dataset.indexed.get(n)[:-1].tolist(), dataset.indexed.get(n)[1:].tolist())
        )
        assert seen == expected
    assert dataset.pieces(0) != dataset.pieces(epoch), "another order in every epoch"
    traced = trace_sample(dataset, 3).documents
    assert [(t.place.document, t.place.position, t.length) for t in traced] == dataset.pieces(3)
    [told] = [record.getMessage() for record in caplog.records if "best fit cuts" in record.getMessage()]
    assert "best fit cuts 1.67% of 60 documents (concatenated, " in told
    share = float(told.partition("concatenated, ")[2].partition("%")[0])
    assert share > 20


def test_a_piece_sees_itself_alone_and_padding_counts_nothing() -> None:
    sample = {"ids": np.array([5, 6, 7, 8, 9, 0, 0]), "begins": np.array([0, 0, 0, 3, 3, -1, -1])}
    batch = make_best_fit_batch([sample], LoaderOptions(micro_batch_size=1, seed=1, eod=8, eod_mask_loss=True))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0]] and batch.labels.tolist() == [[6, 7, 8, 9, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0, 0]] and batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]] and batch.documents is not None
    assert batch.documents.cu_seqlens.tolist() == [0, 3, 5, 6]


def test_the_packing_is_a_function_of_files_and_seed(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, longer = packed(make_dataset, tmp_path, 30), packed(make_dataset, tmp_path, 300)
    assert first.fingerprint == longer.fingerprint and [first.pieces(i) for i in range(30)] == [
        longer.pieces(i) for i in range(30)
    ]
    lengths = np.random.default_rng(1).integers(0, 40, 500).astype(np.int32)
    one, other = build_packing(lengths, range(500), 15, 1), build_packing(lengths, range(500), 15, 2)
    assert not np.array_equal(one["sequences"], other["sequences"])
    monkeypatch.setattr(best_fit_dataset, "GROUP_DOCUMENTS", 64)
    grouped = build_packing(lengths, range(500), 15, 1)
    assert len(grouped["sequences"]) == len(one["sequences"]) and len(grouped["bounds"]) <= 1.1 * len(one["bounds"])


def test_what_cannot_be_packed_is_told(make_dataset: MakeDataset, tmp_path: Path) -> None:
    single = run_config(tmp_path, data_path=(make_dataset([[1], [2]]),), split="1", dataset_type="best-fit")
    with pytest.raises(DataError, match="have no two tokens that follow one another"):
        build_datasets(single, None, (1, 0, 0))
    beyond = make_dataset([[1] * 3] * 200 + [[4, 5, 6], [7, 2000]] + [[1] * 3] * 200, "beyond", "int32")
    config = run_config(tmp_path, data_path=(beyond,), split="1", dataset_type="best-fit")
    dataset = build_datasets(config, None, (400, 0, 0)).train
    assert dataset is not None
    with pytest.raises(DataError, match="beyond: document 201, token 1, has the id 2000"):
        [dataset[index] for index in range(400)]


def test_layers_that_see_whole_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionSpec, "separates_documents", False)
    flags = "--mock-data --lr 1e-3 --train-iters 2".split()
    run = load_config([*flags, "--dataset-type", "best-fit"], preset="tiny-llama").config
    with pytest.raises(
        ConfigError, match="--dataset-type best-fit separates packed documents, but layers of this model"
    ):
        check_training(run, model_spec(run))
    run = load_config(flags, preset="tiny-llama").config
    check_training(run, model_spec(run))


FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 600 --lr 1e-3 "
    "--dataset-type best-fit --global-batch-size 4 --eval-iters 0 --log-interval 1 --device cpu --live off --split 1 --lr-decay-iters 6 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
).split()


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["iteration"]: r["lm_loss"] for r in records if "lm_loss" in r and "iteration" in r}


@pytest.mark.usefixtures("forked_ranks")
def test_a_blend_trains_resumes_and_is_split_by_context_parallelism(make_dataset: MakeDataset, tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    names = ("one", "two")
    prefixes = [
        make_dataset([random.integers(1, 600, random.integers(2, 30)).tolist() for _ in range(50)], name)
        for name in names
    ]
    data = ["--data-path", "0.6", prefixes[0], "0.4", prefixes[1]]

    def train(name: str, *flags: str) -> dict[int, float]:
        assert main(["train", *FLAGS, *data, "--save", str(tmp_path / name), *flags]) == 0
        return losses(tmp_path / name)

    whole = train("whole", "--train-iters", "6")
    train("cut", "--train-iters", "3")
    resumed = train("cut", "--train-iters", "6", "--load", str(tmp_path / "cut"))
    assert {i: resumed[i] for i in (4, 5, 6)} == {i: whole[i] for i in (4, 5, 6)}
    split = train("split", "--train-iters", "6", "--cp", "2")
    assert split.keys() == whole.keys() and all(abs(split[i] - whole[i]) < 1e-5 * whole[i] for i in whole)
