"""Files of item histories, and the samples of the leave-one-out split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.data.dataset_kinds import DatasetRequest, Split
from petatron.data.recommendation.history_file import (
    FORMAT,
    ItemHistories,
    read_histories,
    write_histories,
)
from petatron.data.recommendation.item_history_dataset import (
    HistorySource,
    ItemHistoryKind,
    NegativeSampling,
    target_shares,
    windows_of,
)
from petatron.data.recommendation.item_names_file import names_path, read_item_names

HISTORIES = ItemHistories.of_users(
    [[3], [4, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8], [5, 5, 2]],
    [[7], [1, 2], list(range(10, 19)), [1, 1, 9]],
    num_items=9,
)


def request(split: Split, count: int = 8, seq_length: int = 4) -> DatasetRequest:
    return DatasetRequest(split=split, num_samples=count, seq_length=seq_length, seed=3, vocab_size=9)


def samples(split: Split, count: int, negatives: NegativeSampling | None = None, seq_length: int = 4) -> list[dict]:
    source = HistorySource("file", HISTORIES, negatives)
    assert source.samples_per_epoch(range(4), request(split, seq_length=seq_length)) == count
    dataset = source.dataset(range(4), request(split, count, seq_length))
    return [dataset[index] for index in range(count)]


def counted(sample: dict) -> list[int]:
    return sample["labels"][sample["loss_mask"] > 0].tolist()


def test_every_item_of_training_is_predicted_once():
    targets = Counter(item for sample in samples("train", 3) for item in counted(sample))
    assert targets == Counter([1, *range(1, 7)])


@pytest.mark.parametrize(("split", "targets"), [("valid", [7, 5]), ("test", [8, 2])])
def test_one_item_is_left_out_for_each_evaluation(split: Split, targets: list[int]):
    made = samples(split, 2)
    assert [counted(sample) for sample in made] == [[target] for target in targets]
    assert made[0]["tokens"].tolist() == ([3, 4, 5, 6] if split == "valid" else [4, 5, 6, 7])
    assert made[1]["tokens"].tolist() == ([5, -1, -1, -1] if split == "valid" else [5, 5, -1, -1])


def test_times_are_those_of_the_items_that_are_seen():
    [first, second] = samples("test", 2)
    assert first["timestamps"].tolist() == [14, 15, 16, 17] and second["timestamps"].tolist() == [1, 1, 1, 1]


def test_samples_are_padded_and_padding_is_not_predicted():
    short = next(sample for sample in samples("train", 3) if sample["tokens"][0] == 4)
    assert short["tokens"].tolist() == [4, -1, -1, -1] and short["loss_mask"].tolist() == [1, 0, 0, 0]


def test_negatives_are_a_function_of_seed_and_number():
    first, second = (samples("train", 3, NegativeSampling(5)) for _ in range(2))
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(first, second) for name in a)
    assert {len(sample["negatives"]) for sample in first} == {5}
    assert not np.array_equal(first[0]["negatives"], first[1]["negatives"])
    shares = target_shares(HISTORIES)
    assert shares[1] == pytest.approx(2 / 7) and shares[[0, 7, 8]].sum() == 0
    assert np.array_equal(first[0]["negative_shares"], shares[first[0]["negatives"]])


def test_windows_end_with_the_history():
    for length in range(1, 30):
        for seq_length in (1, 3, 8):
            windows = windows_of(np.array([length]), "train", seq_length)
            targets = [t for b, e in zip(windows.begins, windows.ends) for t in range(b + 1, e)][-length:]
            trained = length - 2 if length > 2 else length
            assert set(range(1, trained)) <= set(targets)
            assert (windows.ends - windows.begins <= seq_length + 1).all() and (
                windows.ends - windows.begins >= 2
            ).all()


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "users.safetensors"
    write_histories(path, HISTORIES, [f"film {number}" for number in range(9)])
    stored = read_histories(path)
    assert stored.fingerprint == HISTORIES.fingerprint and stored.num_items == 9
    assert stored.times is not None and stored.user(2).tolist() == list(range(9))
    assert read_item_names(names_path(path))[8] == "film 8"


BROKEN = {
    "offsets": ({"offsets": [0, 5, 3], "items": [0, 1, 2]}, "has offsets that are not increasing from 0"),
    "lengths": ({"offsets": [0, 4], "items": [0, 1, 2]}, "has other numbers of interactions"),
    "items": (
        {"offsets": [0, 3], "items": [0, 9, 2]},
        r"has the item 9 \(1 such interactions\), and says that its items are 0 to 8",
    ),
    "missing": ({"items": [1]}, "KeyError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str):
    tensors, message = BROKEN[name]
    path = tmp_path / "users.safetensors"
    save_file(
        {key: np.array(x, np.int64) for key, x in tensors.items()}, path, metadata={"format": FORMAT, "num_items": "9"}
    )
    with pytest.raises(DataError, match=message):
        read_histories(path)


def test_files_of_other_kinds_and_names_that_do_not_fit_are_refused(tmp_path: Path):
    path = tmp_path / "users.safetensors"
    save_file({"items": np.zeros(1, np.int64)}, path)
    with pytest.raises(DataError, match="is no file of item histories"):
        read_histories(path)
    save_file(
        {"offsets": np.zeros(1, np.int32), "items": np.zeros(0, np.int32)},
        path,
        metadata={"format": FORMAT, "num_items": "9"},
    )
    with pytest.raises(DataError, match="another dtype than int64"):
        read_histories(path)
    (tmp_path / "text").write_text("1::2")
    with pytest.raises(DataError, match="cannot be understood"):
        read_histories(tmp_path / "text")
    with pytest.raises(DataError, match="2 names were given for 9 items"):
        write_histories(path, HISTORIES, ["a", "b"])
    with pytest.raises(DataError, match="and such a file at most"):
        write_histories(path, ItemHistories.of_users([[1]], None, num_items=1 << 40))
    with pytest.raises(DataError, match="has the item 9"):
        write_histories(path, ItemHistories.of_users([[9]], None, num_items=9))
    (tmp_path / "names").write_text("a\na\n")
    with pytest.raises(DataError, match="has the name 'a' twice"):
        read_item_names(tmp_path / "names")


def test_a_model_with_fewer_items_and_histories_that_are_too_short_are_refused(tmp_path: Path):
    path = tmp_path / "users.safetensors"
    write_histories(path, HISTORIES)
    small = DatasetRequest(split="train", num_samples=1, seq_length=4, seed=1, vocab_size=8)
    with pytest.raises(DataError, match="has 9 items, and the model 8"):
        ItemHistoryKind().open(str(path), small)
    alone = HistorySource("file", ItemHistories.of_users([[1], [2]], None, num_items=3), None)
    with pytest.raises(DataError, match="no history has the 2 items that a sample of the train split needs"):
        alone.dataset(range(2), request("train"))
    pairs = HistorySource("file", ItemHistories.of_users([[1, 2]], None, num_items=3), None)
    with pytest.raises(DataError, match="no history has the 3 items that a sample of the valid split needs"):
        pairs.dataset(range(1), request("valid"))


FLAGS = (
    "--model-type recommender --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --train-iters 3 "
    "--lr 1e-2 --micro-batch-size 2 --num-workers 0 --device cpu"
)


REFUSED = {
    "--pipeline-model-parallel-size 2 --num-layers 2": "puts the items of histories and the scores on different stages",
    "--recommender-layers hstu --num-experts 2": "all of --recommender-layers hstu are HSTU",
    "--recommender-layers hstu --multi-latent-attention": "all of --recommender-layers hstu are HSTU",
    "--item-loss sampled_softmax --item-negatives both --cp 2": "takes the targets of whole ones",
    "--logits-scaling 2": "is about the logits of a decoder",
    "--final-logit-softcapping 2": "is about the logits of a decoder",
    "--use-mup": "scales the logits of a decoder",
    "--optimizer adafactor": "updates a tensor at a time, and of the table of items only the rows",
    "--optimizer-cpu-offload": "copies state to the device in long segments",
    "--tokenizer-type ByteTokenizer --reset-attention-mask": "has histories of items",
    "--cuda-graphs on --device cuda": "cannot capture a step with a table of items",
    "--item-loss sampled_softmax --num-item-negatives 0": "is below 1",
    "--objective next-item --model-type decoder": "needs target_ranks of the model",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_recommender_cannot_be_is_refused(flags: str):
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        run = petatron.load(
            None, [*FLAGS.split(), "--no-untie-embeddings-and-output-weights", "--mock-data", *flags.split()]
        )
        petatron.build_model(run, petatron.launch(run))


def test_hstu_is_refused_where_sequences_are_split():
    from petatron.models.registry import model_spec
    from petatron.validate import load_config
    from petatron.validate.layer_capabilities import check_training

    run = load_config([*FLAGS.split(), "--mock-data", "--recommender-layers", "hstu", "--cp", "2"], world_size=2).config
    with pytest.raises(ConfigError, match="no way of it suits all layers of this model: hstu"):
        check_training(run, model_spec(run))
