"""Recommendations are the best items by the scores of the model, in every layout and whatever shares a step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import DataError
from petatron.config import RunConfig
from petatron.infer.recommend.best_items import History, best_items
from petatron.infer.recommend.recommender_engine import RecommenderEngine
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.build_run import build_model
from petatron.validate import load_config
from petatron.validate.layer_capabilities import why_reading_only
from tests.dist import RankPool

FLAGS = (
    "--model-type recommender --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 23 --train-iters 1 "
    "--lr 1e-2 --mock-data --device cpu --fp64 --init-method-std 0.5"
)
HISTORIES = [
    History([3, 5, 3], [0, 5, 90], count=4),
    History([7], [10], count=2, leave_out=False),
    History(list(range(16)), list(range(16)), count=23),
]


def run_of(flags: str, world_size: int = 1) -> RunConfig:
    return load_config(f"{FLAGS} {flags}".split(), world_size=world_size).config


def recommend(run: RunConfig) -> list[list[tuple[int, float]]]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    return best_items(build_model(run, mesh), HISTORIES, batch_tokens=48)


def alone(flags: str = "") -> ParallelModel:
    return build_model(run_of(flags), ParallelMesh.single())


@pytest.mark.parametrize("flags", ["", "--recommender-layers hstu"])
def test_recommendations_are_the_best_by_score(flags: str):
    model = alone(flags)
    for history, found in zip(HISTORIES, recommend(run_of(flags)), strict=True):
        arrays = {"tokens": torch.tensor([history.items]), "timestamps": torch.tensor([history.times])}
        [outputs] = model.forward([Batch(arrays=arrays)], collect=["item_scores"])
        scores = outputs["item_scores"][0]
        left = [item for item in range(23) if not (history.leave_out and item in history.items)]
        best = sorted(left, key=lambda item: (-float(scores[item]), item))[: history.count]
        assert [item for item, _ in found] == best
        assert [score for _, score in found] == pytest.approx(scores[best].tolist(), rel=1e-12)


@pytest.mark.parametrize("layout", ["--dp 2", "--tp 2 --sequence-parallel", "--cp 2"])
def test_every_layout_recommends_the_same(ranks: RankPool, layout: str):
    expected = recommend(run_of(""))
    for found in ranks.run(recommend, 2, run_of(layout, 2)):
        for ours, theirs in zip(found, expected, strict=True):
            assert [item for item, _ in ours] == [item for item, _ in theirs]
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-9)


def test_what_is_no_request_for_items_is_refused():
    model = alone("--recommender-layers hstu")
    reason = why_reading_only(model.spec)
    assert reason is not None
    engine = RecommenderEngine(model, None, None, reads_only=reason)
    with pytest.raises(DataError, match="it recommends items after a history"):
        engine.submit([1], SamplingParams())
    with pytest.raises(DataError, match="it recommends items after a history"):
        engine.submit([1], SamplingParams(max_new_tokens=0, pooling="mean"))
    asked = SamplingParams(max_new_tokens=0, best_items=3, history_times=(1,))
    with pytest.raises(DataError, match="reads the times of interactions: 1 were given for 2 items"):
        engine.submit([1, 2], asked)
    with pytest.raises(DataError, match="the model's vocabulary has 23 ids"):
        engine.submit([23], asked)
    with pytest.raises(DataError, match="the model has 16 positions"):
        engine.submit([1] * 17, SamplingParams(max_new_tokens=0, best_items=3, history_times=(1,) * 17))


def test_requests_are_answered_in_steps():
    engine = RecommenderEngine(alone(), None, None, reads_only="It recommends.")
    params = SamplingParams(max_new_tokens=0, best_items=3)
    first, second = engine.submit([1, 2], params), engine.submit([4], params)
    engine.cancel(second)
    assert [event.finish_reason for event in engine.step()] == ["cancelled", "length"]
    assert len(engine.take(first).items) == 3 and not engine.has_work
    assert engine.take(second).finish_reason == "cancelled" and engine.stats.prompt_tokens == 2
