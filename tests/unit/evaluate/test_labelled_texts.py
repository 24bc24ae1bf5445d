"""`petatron eval --task labels`: what is measured of classifiers, of models that predict numbers, and of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import ConfigError, DataError
from petatron.data.labelled.encode_texts import TextEncoder
from petatron.data.tokenizer import ByteTokenizer
from petatron.evaluate.eval_task import ContextLimits, TaskResult
from petatron.evaluate.labelled_texts import (
    LabelledTextsTask,
    classification_metrics,
    label_outputs,
    regression_metrics,
    retrieval_metrics,
)
from petatron.evaluate.task_list import TaskSettings, setting_problems
from petatron.infer.encoder.pooled_states import pooled_states
from petatron.infer.sampling_params import PoolingName
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.validate.layer_capabilities import why_reading_only
from tests.dist import RankPool
from tests.parity.harness import tiny_run

_BYTES = "--vocab-size 257 --seq-length 32"
_BERT = f"--model-type bert --pooling mean {_BYTES}"
LIMITS = ContextLimits(33, 32)


def write(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def measure(flags: str, path: Path, **settings: Any) -> TaskResult:
    """On one rank."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    run = tiny_run(flags, world_size=size)
    model = petatron.build_model(run, ParallelMesh(Layout.from_config(run.parallel), rank))
    return LabelledTextsTask(path=path, tokenizer=ByteTokenizer(), limits=LIMITS, **settings).run(model)


TEXTS = [{"text": "a" * length, "label": length % 3} for length in (3, 30, 9, 17, 5, 40)]


@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", "--cp 2", "--pp 2", "--dp 2"])
def test_every_layout_measures_the_same(ranks: RankPool, tmp_path: Path, layout: str):
    flags, path = f"--objective classification --num-labels 3 {_BYTES}", write(tmp_path, *TEXTS)
    alone = measure(flags, path)
    assert alone.counts["texts"] == 6 and alone.counts["of 0"] == 3
    assert alone.notes == ("1 text longer than the model reads, and cut",)
    for result in ranks.run(measure, 2, f"{flags} {layout}", path):
        assert result.counts == alone.counts
        assert result.values() == pytest.approx(alone.values(), rel=1e-5)


def test_answers_are_those_of_the_text_alone(tmp_path: Path):
    run = tiny_run(f"{_BERT} --objective classification --num-labels 3")
    model = petatron.build_model(run, ParallelMesh.single())
    rows = TextEncoder(ByteTokenizer(), is_encoder=True).encode([("some text",), ("a pair", "of texts"), ("x",)], 32)
    together = label_outputs(model, rows, output="label_logits", batch_tokens=8192)
    alone = [label_outputs(model, [row], output="label_logits", batch_tokens=8192)[0] for row in rows]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_served_embeddings_are_the_pooled_states_of_training(pooling: PoolingName):
    run = tiny_run(f"--objective contrastive --pooling {pooling} {_BYTES}")
    model = petatron.build_model(run, ParallelMesh.single())
    assert "ends with a head on whole texts" in str(why_reading_only(model.spec))
    rows = TextEncoder(ByteTokenizer(), is_encoder=False).encode([("some text",), ("x",)], 32)
    served = pooled_states(model, [row.ids for row in rows], pooling=pooling)
    trained = label_outputs(model, rows, output="pooled_states", batch_tokens=8192)
    np.testing.assert_allclose(served, trained, atol=1e-5)


def test_numbers_and_embeddings(tmp_path: Path):
    path = write(tmp_path, *({"text": "a" * number, "label": number / 9} for number in (1, 4, 9)))
    assert set(measure(f"--objective regression {_BYTES}", path).metrics) >= {"squared_error", "pearson", "spearman"}
    path = write(tmp_path, *({"text": "a", "label": [0.5, number]} for number in (1, 4)))
    assert measure(f"--objective regression --num-labels 2 {_BYTES}", path).counts == {"texts": 2}
    path = write(tmp_path, *({"query": letter, "positive": letter, "negatives": []} for letter in "abcd"))
    found = measure(f"--objective contrastive {_BYTES}", path)
    assert found.values()["recall@1"] == 1 and found.counts == {"queries": 4, "texts": 4}
    assert measure(f"--objective contrastive {_BYTES}", path, limit=2).counts["queries"] == 2


def test_models_and_files_that_do_not_fit(tmp_path: Path):
    path = write(tmp_path, {"text": "a", "label": "good"})
    with pytest.raises(DataError, match="the model predicts tokens"):
        measure(_BYTES, path)
    with pytest.raises(DataError, match='"good" is none of --label-names bad fair'):
        measure(f"--objective classification --label-names bad fair {_BYTES}", path)


def test_settings_of_other_tasks_have_no_effect(tmp_path: Path):
    settings = TaskSettings(task="labels", data=write(tmp_path, TEXTS[0]), bos=True)
    problems = list(setting_problems(settings, where="--task"))
    with pytest.raises(ConfigError, match="--bos has no effect on labels"):
        raise ConfigError(problems)


def test_metrics_by_hand():
    logits = np.array([[3.0, 0, 0], [0, 3, 0], [0, 3, 0], [3, 0, 0]])
    estimates, counts = classification_metrics(logits, np.array([0, 1, 0, 0]), ["a", "b", "c"])
    assert estimates["accuracy"].value == 0.75 == estimates["most_frequent"].value
    assert estimates["macro_f1"].value == pytest.approx((4 / 5 + 2 / 3) / 2)  # nothing is c, and nothing was said to be
    assert (counts["of a"], counts["right a"], counts["of c"]) == (3, 2, 0)
    estimates, _ = regression_metrics(np.array([[0.0], [1], [1], [5]]), np.array([[0.0], [2], [3], [3]]))
    assert estimates["squared_error"].value == pytest.approx((1 + 4 + 4) / 4)
    assert estimates["spearman"].value == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3.5, 3.5])[0, 1])
    states = np.array([[1.0, 0], [1, 0.2], [0, 1], [0.3, 1], [1, 0.1]])  # two queries, a negative of the second
    estimates, counts = retrieval_metrics(states, [2, 3])
    assert estimates["recall@1"].value == 0.5 and estimates["mean_reciprocal_rank"].value == 0.75
    assert counts == {"queries": 2, "texts": 3}
