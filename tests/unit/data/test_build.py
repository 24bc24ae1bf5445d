from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.config.schema.data import DataConfig
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import TrainConfig
from petatron.data import gpt_dataset
from petatron.data.batch_loader import SampleDataset
from petatron.data.build_datasets import build_datasets
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, RecordSource, register_dataset
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.tokenizer import ByteTokenizer

from .conftest import MakeDataset


def run_config(tmp_path: Path, vocab_size: int | None = 1000, **data: object) -> RunConfig:
    options = DataConfig(**{"data_cache_path": str(tmp_path / "cache"), **data})  # type: ignore[arg-type]
    return RunConfig(model=ModelConfig(seq_length=8, vocab_size=vocab_size), data=options, train=TrainConfig(seed=1))


def tokens(dataset: SampleDataset | None) -> Counter[int]:
    assert dataset is not None
    return Counter(int(token) for index in range(len(dataset)) for token in dataset[index])


def hundreds(base: int, documents: int) -> list[list[int]]:
    return [list(range(base + 10 * d, base + 10 * d + 10)) for d in range(documents)]


def test_one_dataset_is_cut_by_split(make_dataset: MakeDataset, tmp_path: Path) -> None:
    prefix = make_dataset(hundreds(0, 20))
    config = run_config(tmp_path, data_path=(prefix,), split="80,10,10")
    built = build_datasets(config, None, (40, 3, 2))
    assert built.train is not None and len(built.train) >= 40
    assert set(tokens(built.train)) == set(range(160))
    assert set(tokens(built.valid)) == set(range(160, 180)) and set(tokens(built.test)) <= set(range(180, 200))
    assert build_datasets(config, None, (5, 0, 0)).valid is None


def test_weighted_blend(make_dataset: MakeDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    web, code = make_dataset(hundreds(0, 20), "web"), make_dataset(hundreds(500, 20), "code")
    config = run_config(tmp_path, data_path=("3", web, "1", code), split="1")
    with caplog.at_level(logging.INFO, logger="petatron"):
        train = build_datasets(config, None, (80, 0, 0)).train
    assert train is not None and len(train) == 80
    assert sum(train[i][0] >= 500 for i in range(80)) == 20
    rows = [record.getMessage().split() for record in caplog.records]
    assert rows[0] == ["train", "documents", "tokens", "samples", "epochs", "dataset"]
    assert rows[1] == ["20", "200", "60", "2.40", web] and rows[2] == ["20", "200", "20", "0.80", code]


def test_blend_without_weights(make_dataset: MakeDataset, tmp_path: Path) -> None:
    big, small = make_dataset(hundreds(0, 30), "big"), make_dataset(hundreds(500, 10), "small")
    config = run_config(tmp_path, data_path=(big, small), split="1")
    once = build_datasets(config, None, (10, 0, 0)).train
    assert once is not None and len(once) == 299 // 8 + 99 // 8  # one epoch of each
    more = build_datasets(config, None, (200, 0, 0)).train
    assert more is not None and len(more) == 200
    assert sum(more[i][0] >= 500 for i in range(200)) == 50


def test_a_dataset_named_often_is_built_once(
    make_dataset: MakeDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of 33 KB may name one dataset four thousand times; equal shares of it are equal samples."""
    built: list[int | None] = []
    plain = gpt_dataset.GPTDataset

    def counted(*args: Any, num_samples: int | None, **options: Any) -> GPTDataset:
        built.append(num_samples)
        return plain(*args, num_samples=num_samples, **options)

    monkeypatch.setattr(gpt_dataset, "GPTDataset", counted)
    prefix = make_dataset(hundreds(0, 20))
    config = run_config(tmp_path, data_path=("0.25", prefix) * 4, split="100,0,0")
    assert len(tokens(build_datasets(config, None, (8, 0, 0)).train)) > 0
    assert built == [3], "two, and half a percent rounded up"


def test_paths_per_split_and_args_file(make_dataset: MakeDataset, tmp_path: Path) -> None:
    train, valid = make_dataset(hundreds(0, 20), "a"), make_dataset(hundreds(500, 3), "b")
    config = run_config(tmp_path, train_data_path=(train,), valid_data_path=(valid,))
    built = build_datasets(config, None, (40, 9, 0))
    assert set(tokens(built.train)) == set(range(200)) and set(tokens(built.valid)) == set(range(500, 530))
    with pytest.raises(DataError, match=r"No data is given for test.*--test-data-path"):
        build_datasets(config, None, (10, 3, 1))
    (tmp_path / "args").write_text(f"0.5 {train}\n0.5 {valid}\n")
    config = run_config(tmp_path, data_args_path=str(tmp_path / "args"), split="1")
    assert max(tokens(build_datasets(config, None, (10, 0, 0)).train)) >= 500
    with pytest.raises(DataError, match="Use one of the two"):
        build_datasets(run_config(tmp_path, data_path=(train,), valid_data_path=(valid,)), None, (1, 1, 0))
    with pytest.raises(DataError, match=r"--data-args-path .* cannot be read"):
        build_datasets(run_config(tmp_path, data_args_path=str(tmp_path / "none")), None, (1, 0, 0))
    with pytest.raises(DataError, match="No data is given for train, valid"):
        build_datasets(run_config(tmp_path), None, (1, 1, 0))


def test_all_problems_come_together(make_dataset: MakeDataset, tmp_path: Path) -> None:
    good, cut = make_dataset(hundreds(0, 20), "good"), make_dataset(hundreds(0, 20), "cut")
    strange = make_dataset([[5], [2000]], "strange")
    Path(f"{cut}.bin").write_bytes(Path(f"{cut}.bin").read_bytes()[:-2])
    config = run_config(tmp_path, data_path=(good, cut, strange, str(tmp_path / "gone")), split="1")
    with pytest.raises(DataError) as caught:
        build_datasets(config, None, (1, 0, 0))
    message = str(caught.value)
    assert message.startswith("3 problems in the data:")
    assert "cut.bin is truncated" in message and "gone.idx does not exist" in message
    assert "strange: document 1, token 0, has the id 2000, but the vocabulary has 1000 ids" in message


def test_vocabulary_of_the_tokenizer_is_checked(make_dataset: MakeDataset, tmp_path: Path) -> None:
    config = run_config(tmp_path, vocab_size=None, data_path=(make_dataset([[5], [257]]),))
    with pytest.raises(DataError, match="vocabulary has 257 ids"):
        build_datasets(config, ByteTokenizer(), (1, 0, 0))
    assert build_datasets(config, None, (1, 0, 0)).train is not None


def test_empty_split_is_reported_only_if_needed(make_dataset: MakeDataset, tmp_path: Path) -> None:
    config = run_config(tmp_path, data_path=(make_dataset(hundreds(0, 4)),), split="99,1,0")
    built = build_datasets(config, None, (1, 7, 1))
    assert built.train is not None and built.valid is None and built.test is None
    asked = replace(config, train=replace(config.train, eval_interval=5))
    with pytest.raises(DataError) as caught:
        build_datasets(asked, None, (1, 7, 1))
    assert "the valid split is empty: --split 99,1,0 gives it 0 of 4 documents, but 7 samples" in str(caught.value)


class NoRecords(RecordSource):
    def record(self, index: int, request: DatasetRequest) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class EmptyFiles(DatasetKind):
    def open(self, source: str, request: DatasetRequest) -> DataSource:
        if source == "gone":
            Path(source).read_text()
        return NoRecords(source, num_units=0, fingerprint="")


register_dataset("empty-files", EmptyFiles)


def test_an_empty_file_is_told_as_one(tmp_path: Path) -> None:
    for paths in ({"train_data_path": ("a",)}, {"data_path": ("a",)}):
        config = run_config(tmp_path, dataset_type="empty-files", **paths)
        with pytest.raises(
            DataError, match=r"a: the train split is empty: the file has no records, but 1 samples.* that has some"
        ):
            build_datasets(config, None, (1, 0, 0))


def test_files_that_a_kind_cannot_read_are_told_together(tmp_path: Path) -> None:
    config = run_config(tmp_path, dataset_type="empty-files", train_data_path=("gone",))
    with pytest.raises(DataError, match=r"gone cannot be read: No such file or directory\. Give files\."):
        build_datasets(config, None, (1, 0, 0))


def test_a_name_of_two_validation_sets_is_told(make_dataset: MakeDataset, tmp_path: Path) -> None:
    good = make_dataset(hundreds(0, 4))
    twice = run_config(tmp_path, train_data_path=(good,), valid_data_path=(f"web={good}", f"web={good}"))
    with pytest.raises(ConfigError, match=r"names web twice.*\s.*a name of its own"):
        build_datasets(twice, None, (1, 1, 0))


def test_mock(tmp_path: Path) -> None:
    config = run_config(tmp_path, vocab_size=None, mock_data=True)
    built = build_datasets(config, ByteTokenizer(), (5, 2, 0))
    assert built.train is not None and len(built.train) == 5 and built.test is None
    assert built.valid is not None and not np.array_equal(built.train[0], built.valid[0])
    with pytest.raises(DataError, match="--mock-data needs --vocab-size"):
        build_datasets(config, None, (5, 0, 0))
    sized = replace(config, model=replace(config.model, vocab_size=4))
    assert max(tokens(build_datasets(sized, None, (5, 0, 0)).train)) == 3


def warnings_of(config: RunConfig, counts: tuple[int, int, int]) -> tuple[str, ...]:
    return build_datasets(config, None, counts).warnings


def test_data_that_are_too_small_are_told_in_one_line_each(make_dataset: MakeDataset, tmp_path: Path) -> None:
    tiny = make_dataset([list(range(7))], "tiny")
    config = run_config(tmp_path, data_path=(tiny,), split="1")
    assert warnings_of(config, (100, 0, 0)) == (
        f"few tokens for training: {tiny} has 7 tokens, and one sample has 8, which repeats them 1.1 times; the run repeats them 114 times",
    )
    book = make_dataset(hundreds(0, 10), "book")
    config = run_config(tmp_path, data_path=(book,), split="8,1,1")
    assert warnings_of(config, (200, 0, 0)) == (
        f"many epochs: {book} has 80 tokens, which the run reads 20.0 times. Above about 16 epochs a model mostly memorizes: "
        "use more data, or fewer iterations",
    )
    single, repeated = warnings_of(config, (100, 300, 0))
    assert single.startswith(
        f"the validation split is a single document: one of {book} (10 tokens). Its loss tells about"
    )
    assert repeated == (
        "an evaluation reads the 10 tokens of the validation split 80.0 times; --eval-iters 1 reads them about once"
    )
    config = replace(config, train=replace(config.train, eval_iters=2), data=replace(config.data, split="1,1"))
    assert warnings_of(config, (100, 60, 0)) == ()


def test_each_small_source_of_a_blend_is_named_and_a_long_list_is_counted(
    make_dataset: MakeDataset, tmp_path: Path
) -> None:
    web = make_dataset(hundreds(0, 20), "web")
    small = [make_dataset(hundreds(0, 1), f"small{number}") for number in range(5)]
    words = ["9", web, *(word for prefix in small for word in ("1", prefix)), "1", small[0]]
    [text] = warnings_of(run_config(tmp_path, data_path=tuple(words), split="1"), (330, 0, 0))
    assert web not in text and small[2] in text and small[3] not in text and "; and 2 more datasets. Above" in text
    assert f"{small[0]} has 10 tokens, which the run reads 35.2 times; {small[1]} has" in text
