"""The unigram model against its definition, written out."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import DataError
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from petatron.quickstart.evaluate_held_out import UnigramModel, evaluate_held_out

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def naive_loss(train: list[int], text: list[int]) -> float:
    counts = Counter(train)
    return sum(-math.log((counts[token] + 1) / (len(train) + VOCAB)) for token in text)


@settings(max_examples=50, deadline=None)
@given(train=TOKENS, text=TOKENS)
def test_loss_is_the_definition(train: list[int], text: list[int]) -> None:
    unigram = UnigramModel(np.bincount(np.array(train, np.int64), minlength=VOCAB))
    assert unigram.loss(np.array(text, np.int64)) == pytest.approx(naive_loss(train, text))


def write(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def test_all_tokens_of_a_file_are_counted(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 4, 5], [0], [6, 6, 6, 6, 6, 6]]
    unigram = UnigramModel.from_dataset(write(tmp_path / "train", documents), VOCAB)
    text = [0, 1, 5, 6, 6]
    assert unigram.loss(np.array(text)) == pytest.approx(naive_loss([t for d in documents for t in d], text))


def test_probabilities_sum_to_one() -> None:
    unigram = UnigramModel(np.array([5, 0, 3, 0, 0, 1, 2]))
    assert sum(math.exp(-unigram.loss(np.array([token]))) for token in range(VOCAB)) == pytest.approx(1.0)


def settings_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 4, vocab_size: 300}\n"
        f"train: {{train_iters: 1, micro_batch_size: 2, global_batch_size: 4, device: cpu}}\noptim: {{lr: 0.1}}\n"
        f"data: {{train_data_path: [{tmp_path}/train], valid_data_path: [{tmp_path}/valid]}}\n"
        f"tokenizer: {{tokenizer_type: ByteTokenizer}}\ncheckpoint: {{load: {tmp_path}/nothing}}\n"
    )
    return str(path)


def test_too_little_held_out_text(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "train", [[1] * 40]), write(tmp_path / "valid", [[1] * 16])
    with pytest.raises(DataError, match="16 tokens, which is less than one batch of 4 samples of 4"):
        evaluate_held_out(settings_file(tmp_path), train, valid)


def test_no_checkpoint_to_evaluate(tmp_path: Path) -> None:
    train, valid = write(tmp_path / "train", [[1] * 40]), write(tmp_path / "valid", [[1] * 17])
    with pytest.raises(DataError, match="holds no checkpoint to evaluate"):
        evaluate_held_out(settings_file(tmp_path), train, valid)
