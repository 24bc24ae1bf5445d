"""Masked tokens: which are drawn, what of them is counted, and that models which do not predict so are told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerConfig, build_tokenizer
from petatron.evaluate.eval_task import ContextLimits
from petatron.evaluate.language_modeling import read_text_task
from petatron.evaluate.masked_tokens import read_masked_tokens
from petatron.evaluate.score_sequences import SequenceScore
from petatron.infer.encoder.fill_masks import fill_masks
from petatron.mesh.mesh import ParallelMesh
from petatron.train.build_run import build_model
from tests.parity.harness import tiny_run

LIMITS = ContextLimits(max_tokens=33, window=12)
ENCODER = "--model-type bert --num-layers 4 --max-position-embeddings 64 --vocab-size 37"
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    vocabulary = "[PAD] [UNK] [CLS] [SEP] [MASK]".split() + [f"w{number}" for number in range(5, 37)]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"))
    )


def _file(folder: Path, *texts: str) -> Path:
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return folder / "texts.jsonl"


def _text(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_a_share_of_each_window_is_masked_and_always_the_same(tmp_path: Path, tokenizer: Tokenizer):
    file = _file(tmp_path, _text(*range(5, 28)), _text(9), "\u200b")
    task, again = (read_masked_tokens(file, tokenizer, LIMITS) for _ in range(2))
    assert task.sequences == [
        *([CLS, *range(start, min(start + 10, 28)), SEP] for start in (5, 15, 25)),
        [CLS, 9, SEP],
    ]
    assert [len(places) for places in task.places] == [2, 2, 1, 1] and task.places == again.places
    assert all(0 < place < len(ids) - 1 for ids, places in zip(task.sequences, task.places) for place in places)
    assert task.notes == ["1 text without a token left out"]
    assert len(read_masked_tokens(file, tokenizer, LIMITS, limit=1).sequences) == 3
    (tmp_path / "plain.txt").write_text(_text(7, 8))
    assert read_masked_tokens(tmp_path / "plain.txt", tokenizer, LIMITS).sequences == [[CLS, 7, 8, SEP]]


def test_metrics_count_masked_tokens_alone(tmp_path: Path, tokenizer: Tokenizer):
    task = read_masked_tokens(_file(tmp_path, *[_text(8)] * 3, _text(9)), tokenizer, LIMITS)
    rows = [(0.0, False), (math.log(0.25), True), (math.log(0.5), True), (math.log(0.125), False)]
    scores = [
        SequenceScore(np.array([-9.0, logprob, -9.0]), np.array([True, greedy, True])) for logprob, greedy in rows
    ]
    metrics, counts = task.metrics(scores)
    assert metrics["accuracy"].value == 0.5 and metrics["unigram_accuracy"].value == 0.75
    assert metrics["loss"].value == pytest.approx(math.log(64) / 4)
    assert metrics["perplexity"].value == pytest.approx(64**0.25)
    assert counts == {"masked": 4, "correct": 2, "tokens": 12}


def test_a_model_is_scored_as_it_fills_masks(tmp_path: Path, tokenizer: Tokenizer):
    task = read_masked_tokens(_file(tmp_path, _text(*range(5, 30)), _text(9, 9, 9)), tokenizer, LIMITS)
    model = build_model(tiny_run(ENCODER, dtype="float64"), ParallelMesh.single())
    result = task.run(model, batch_tokens=32)
    correct, losses = 0, []
    for ids, places in zip(task.sequences, task.places, strict=True):
        inputs = [MASK if place in places else token for place, token in enumerate(ids)]
        [masks] = fill_masks(model, [inputs], mask_id=MASK, top_k=37)
        for place, predictions in zip(places, masks, strict=True):
            correct += predictions[0].token == ids[place]
            losses += [-math.log(p.probability) for p in predictions if p.token == ids[place]]
    assert result.counts["correct"] == correct
    assert result.values()["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_what_does_not_fit_is_told(tmp_path: Path, tokenizer: Tokenizer):
    file = _file(tmp_path, _text(7, 8))
    with pytest.raises(DataError, match="names no mask"):
        read_masked_tokens(file, ByteTokenizer(), LIMITS)
    with pytest.raises(DataError, match="A window of 2 tokens has no room"):
        read_masked_tokens(file, tokenizer, ContextLimits(max_tokens=9, window=2))
    with pytest.raises(DataError, match="has no text with a token to mask"):
        read_masked_tokens(_file(tmp_path, "\u200b"), tokenizer, LIMITS)
    masked = read_masked_tokens(_file(tmp_path, _text(7, 8)), tokenizer, LIMITS)
    with pytest.raises(DataError, match=r"the model is a decoder. Use --task text"):
        masked.run(build_model(tiny_run("--vocab-size 37"), ParallelMesh.single()))
    text = read_text_task(file, tokenizer, LIMITS)
    with pytest.raises(DataError, match=r"scores next tokens, and the model predicts none. Use --task masked"):
        text.run(build_model(tiny_run(ENCODER), ParallelMesh.single()))
