"""Files of texts with labels: what a line may be, what is wrong with others, and the samples that models read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.data.batch_loader import LoaderOptions
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.labelled.encode_texts import TextEncoder
from petatron.data.labelled.labelled_file import LabelRule, read_labelled_file
from petatron.data.labelled.labelled_text_dataset import LabelledTextKind, pooling_weights
from petatron.data.tokenizer import ByteTokenizer
from petatron.models.batch import Batch
from petatron.models.task_objectives import Contrastive
from petatron.validate import load_config

CLASSES = LabelRule(objective="classification", num_labels=2, label_names=("bad", "good"))
NUMBERED = LabelRule(objective="classification", num_labels=2)
NUMBERS = LabelRule(objective="regression", num_labels=2)
QUERIES = LabelRule(objective="contrastive", num_labels=0, negatives=1)


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_labels_are_names_or_numbers(tmp_path: Path):
    path = write(tmp_path, {"text": "fine", "label": "good"}, "\n", {"text": ["a", "b"], "label": 0})
    records = read_labelled_file(path, CLASSES)
    assert [(record.texts, record.label) for record in records] == [((("fine",),), 1), ((("a", "b"),), 0)]


def test_numbers_and_queries(tmp_path: Path):
    [record] = read_labelled_file(write(tmp_path, {"text": "x", "label": [1, 2.5]}), NUMBERS)
    assert record.label == (1.0, 2.5)
    line = {"query": "q", "positive": "p", "negatives": ["n", "more"]}
    [record] = read_labelled_file(write(tmp_path, line), QUERIES)
    assert record.texts == (("q",), ("p",), ("n",)) and record.label is None


WRONG: list[tuple[LabelRule, Any, str]] = [
    (CLASSES, {"text": "x", "label": "fair"}, 'the label "fair" is none of --label-names bad good'),
    (NUMBERED, {"text": "x", "label": "fair"}, "Add --label-names fair"),
    (NUMBERED, {"text": "x", "label": 2}, "the label 2 is not from 0 to 1, as --num-labels 2 says"),
    (NUMBERED, {"text": "x", "label": True}, "neither a whole number nor a string"),
    (NUMBERED, {"text": "x"}, r"line 1: no key 'label' \(keys here: text\).*label_key=NAME"),
    (NUMBERED, {"label": 1}, r"no key 'text' \(keys here: label\).*text_key=NAME"),
    (NUMBERED, {"text": " ", "label": 1}, "'text' is empty"),
    (NUMBERED, {"text": ["a", "b", "c"], "label": 1}, "neither a string nor a list of two"),
    (NUMBERED, "[1]\n", "a JSON list, not an object"),
    (NUMBERED, '{"text": "x", "text": "y", "label": 1}\n', "the key 'text' is there twice"),
    (NUMBERED, '{"text": \n', "line 1: "),
    (NUMBERED, "\n", "has no lines"),
    (NUMBERS, {"text": "x", "label": [1, "b"]}, "no finite number"),
    (NUMBERS, '{"text": "x", "label": [1, NaN]}\n', "no finite number"),
    (NUMBERS, {"text": "x", "label": 1}, "1 number as label, and --num-labels is 2"),
    (QUERIES, {"query": "q", "positive": "p"}, "0 negatives, and each line needs 1.*negatives=0"),
    (QUERIES, {"query": "q", "positive": "p", "negatives": "n"}, "'negatives' is no list"),
    (QUERIES, {"query": "q", "negatives": ["n"]}, "no key 'positive'"),
]


@pytest.mark.parametrize(("rule", "line", "message"), WRONG)
def test_wrong_lines_are_named(tmp_path: Path, rule: LabelRule, line: Any, message: str):
    with pytest.raises(DataError, match=message):
        read_labelled_file(write(tmp_path, line), rule)


def test_the_first_wrong_lines_are_told_together(tmp_path: Path):
    lines = [{"text": "x", "label": number} for number in range(9)]
    with pytest.raises(DataError, match=r"(?s)line 3.*line 7") as error:
        read_labelled_file(write(tmp_path, *lines), NUMBERED)
    assert "line 8" not in str(error.value)


def test_long_texts_lose_their_end_and_pairs_that_of_the_longer_one():
    encoder = TextEncoder(ByteTokenizer(), is_encoder=True)
    rows = encoder.encode([("abcdef",), ("abcdef", "gh"), ("abc", "defghi")], 4)
    assert [(bytes(row.ids), row.second, row.is_cut) for row in rows] == [
        (b"abcd", 4, True),
        (b"abgh", 2, True),
        (b"abde", 2, True),
    ]
    with pytest.raises(DataError, match="--seq-length 1 has no room"):
        encoder.encode([("a", "b")], 1)


def request(seq_length: int = 6) -> DatasetRequest:
    return DatasetRequest(split="train", num_samples=2, seq_length=seq_length, seed=1, tokenizer=ByteTokenizer())


def kind(**settings: Any) -> LabelledTextKind:
    return LabelledTextKind(num_labels=2, **settings)


def batch_of(made: LabelledTextKind, path: Path, seq_length: int = 6) -> Batch:
    dataset = made.open(str(path), request(seq_length)).dataset(range(2), request(seq_length))
    samples: list[Any] = [dataset[index] for index in range(2)]
    samples = sorted(samples, key=lambda sample: sample["tokens"][0, 0])
    return made.collate(samples, LoaderOptions(micro_batch_size=2, seed=1))


def test_a_batch_says_which_tokens_stand_for_a_text(tmp_path: Path):
    path = write(tmp_path, {"text": "abc", "label": 1}, {"text": "de", "label": 0})
    batch = batch_of(kind(pooling="last"), path)
    assert batch["pooling_weights"].tolist() == [[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert batch["label_ids"].tolist() == [1, 0] and batch.documents is None and "token_types" not in batch
    encoder = batch_of(kind(pooling="first", is_encoder=True), path)
    assert encoder["pooling_weights"].tolist() == [[1, 0, 0, 0, 0, 0]] * 2
    assert encoder.documents is not None


def test_the_rows_of_a_query_follow_each_other(tmp_path: Path):
    lines = [{"query": letter, "positive": "p", "negatives": ["nn"]} for letter in "ab"]
    batch = batch_of(kind(objective="contrastive", negatives=1, pooling="mean"), write(tmp_path, *lines))
    assert batch.rows_per_sample == 3 and batch.num_samples == 2
    assert batch.tokens[:, 0].tolist() == [ord(letter) for letter in "apnbpn"]
    assert batch["pooling_weights"].sum(dim=1).tolist() == [1.0] * 6


def test_long_texts_are_refused_where_that_is_asked(tmp_path: Path):
    path = write(tmp_path, {"text": "abcdefgh", "label": 1})
    with pytest.raises(DataError, match="1 text longer than the 4 tokens of --seq-length"):
        kind(refuse_long=True).open(str(path), request(4))


def test_a_source_needs_a_tokenizer(tmp_path: Path):
    with pytest.raises(DataError, match="needs a tokenizer"):
        kind().open(str(write(tmp_path, {"text": "a", "label": 1})), DatasetRequest(
            split="train", num_samples=1, seq_length=4, seed=1
        ))  # fmt: skip


def test_weights_of_a_mean_sum_to_one():
    weights = pooling_weights(np.array([1, 4, 5]), 6, "mean")
    assert np.allclose(weights.sum(axis=1), 1) and (weights > 0).sum(axis=1).tolist() == [1, 4, 5]


def test_labels_need_an_objective_that_reads_them():
    flags = ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--dataset-type", "labelled-text"]
    run = petatron.load("tiny-llama", flags)
    with pytest.raises(ConfigError, match="--dataset-type labelled-text has labels, which the objective does not read"):
        next(petatron.build_loader(run, petatron.launch(run)))


MODEL = ["--mock-data", "--lr", "1e-3", "--train-iters", "2", "--vocab-size", "64"]
PROBLEMS = {
    "--objective classification": "--num-labels 0 is too few for --objective classification",
    "--objective classification --label-names a b a": "--label-names a is there twice",
    "--objective classification --label-names a b --num-labels 3": "--num-labels 3 is not the number of --label-names, 2",
    "--objective contrastive --micro-batch-size 1": "leaves nothing to compare a text with",
    "--pooling mean": "--objective next-token trains a model to predict tokens, and one with --pooling predicts none",
    "--pooling mean --mtp-num-layers 1": "--mtp-num-layers 1 predicts tokens",
    "--model-type recommender --pooling last": "--model-type recommender has no --pooling yet",
}


@pytest.mark.parametrize("flags", PROBLEMS)
def test_settings_that_do_not_fit(flags: str):
    with pytest.raises(ConfigError, match=PROBLEMS[flags]):
        load_config([*MODEL, *flags.split()], preset="tiny-llama")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--objective contrastive --micro-batch-size 2 --objective-settings temperature=0",
            "temperature=0 is not above 0",
        ),
        ("--pooling mean --objective classification --num-labels 2 --no-label-bias --model-type t5", "t5"),
    ],
)
def test_objectives_that_do_not_fit(flags: str, message: str):
    with pytest.raises(ConfigError, match=message):
        run = petatron.load("tiny-llama", [*MODEL, *flags.split()])
        petatron.build_model(run, petatron.launch(run))


def test_what_follows_from_the_objective():
    def model(flags: str) -> Any:
        return load_config([*MODEL, *flags.split()], preset="tiny-llama").config.model

    decoder = model("--objective classification --label-names no yes")
    assert (decoder.pooling, decoder.num_labels, decoder.pooler, decoder.label_bias) == ("last", 2, False, False)
    encoder = model("--model-type bert --objective regression")
    assert (encoder.pooling, encoder.num_labels, encoder.pooler, encoder.label_bias) == ("first", 1, True, True)
    embedder = model("--model-type bert --objective contrastive --micro-batch-size 2")
    assert (embedder.pooling, embedder.num_labels, embedder.pooler) == ("mean", 0, False)
    assert model("").num_labels == 0


def test_the_loss_of_a_query_is_over_all_texts():
    torch.manual_seed(0)
    states = torch.randn(6, 5, dtype=torch.float64)
    batch = Batch(torch.zeros(6, 2), rows_per_sample=3)
    loss = Contrastive(temperature=0.3).loss({"pooled_states": states}, batch)["contrastive loss"]
    unit = states / states.norm(dim=1, keepdim=True)
    texts = unit[[1, 2, 4, 5]]
    by_hand = [-torch.log_softmax(texts @ unit[query] / 0.3, 0)[target] for query, target in ((0, 0), (3, 2))]
    assert torch.allclose(loss, torch.stack(by_hand))
