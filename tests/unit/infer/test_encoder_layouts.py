"""Vectors of texts and predictions at masks are the same in every layout, of encoders and of decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import ConfigError, DataError
from petatron.config.schema.run import RunConfig
from petatron.infer.encoder.encoder_engine import EncoderEngine
from petatron.infer.encoder.fill_masks import fill_masks
from petatron.infer.encoder.pooled_states import pooled_states
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_model
from petatron.validate.layer_capabilities import why_reading_only
from tests.dist import RankPool
from tests.longform import diagonal, over_nccl
from tests.parity.harness import tiny_run

MASK = 9
ENCODER = "--model-type bert --num-layers 4 --max-position-embeddings 64 --vocab-size 37 --norm-placement post"
DECODER = "--num-layers 4 --max-position-embeddings 64 --vocab-size 37"
TEXTS = [[3, MASK, 4], [5] * 30 + [MASK, MASK], [MASK], [7, 8, 6, 5, 3, 2, MASK, 11]]
LAYOUTS = [
    over_nccl("--tp 2 --sequence-parallel", ENCODER),
    over_nccl("--cp 2", ENCODER),
    ("--cp 2", DECODER),
    over_nccl("--pp 2 --num-virtual-stages-per-pipeline-rank 2", ENCODER),
    ("--dp 2", ENCODER),
    ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", ENCODER),
]


def read(run: RunConfig) -> dict[str, Any]:
    """Runs on a rank."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), rank))
    read = {kind: pooled_states(model, TEXTS, pooling=kind, batch_tokens=64) for kind in ("mean", "first", "last")}
    if run.model.model_type == "bert":
        read["masks"] = [
            [value for mask in masks for prediction in mask for value in prediction]
            for masks in fill_masks(model, TEXTS, mask_id=MASK, top_k=3, batch_tokens=64)
        ]
    return read


@diagonal(2)
@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_layouts_agree(ranks: RankPool, layout: str, model: str):
    expected = read(tiny_run(model, dtype="float64"))
    run = tiny_run(f"{model} {layout}", world_size=2, dtype="float64")
    for values in ranks.run(read, 2, run):
        assert values.keys() == expected.keys()
        for kind, rows in values.items():
            for row, wanted in zip(rows, expected[kind], strict=True):
                assert row == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_padding_changes_nothing_and_the_engine_of_decoders_has_the_same_vectors():
    encoder, decoder = (
        build_model(tiny_run(flags, dtype="float64"), ParallelMesh.single()) for flags in (ENCODER, DECODER)
    )
    together = pooled_states(encoder, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert pooled_states(encoder, [text])[0] == pytest.approx(vector, rel=1e-9)
    engine = Engine(decoder)
    for pooling in ("mean", "first", "last"):
        params = SamplingParams(max_new_tokens=0, pooling=pooling)
        [[answer], *_] = engine.complete(TEXTS[1:], params)
        assert answer.pooled == pytest.approx(pooled_states(decoder, TEXTS[1:2], pooling=pooling)[0], rel=1e-9)


def _follow(run: RunConfig) -> list[list[float]] | None:
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()))
    engine = EncoderEngine(model, None, EngineOptions(max_step_tokens=9), reads_only="It is an encoder.")
    if dist.get_rank():
        engine.follow()
        return None
    kinds = ("mean", "first", "last", "mean")
    requests = [engine.submit(text, SamplingParams(max_new_tokens=0, pooling=kind)) for text, kind in zip(TEXTS, kinds)]
    ended = []
    while engine.has_work:
        ended += [event.request for event in engine.step()]
    assert ended == requests and engine.stats.prompt_tokens == sum(map(len, TEXTS)) and engine.step() == []
    engine.close()
    return [engine.take(request).pooled or [] for request in requests]


def test_ranks_follow_the_first(ranks: RankPool):
    model = build_model(tiny_run(ENCODER, dtype="float64"), ParallelMesh.single())
    kinds = ("mean", "first", "last", "mean")
    wanted = [pooled_states(model, [text], pooling=kind)[0] for text, kind in zip(TEXTS, kinds)]
    answers, nothing = ranks.run(_follow, 2, tiny_run(f"{ENCODER} --tp 2", world_size=2, dtype="float64"))
    assert nothing is None
    for answer, vector in zip(answers, wanted, strict=True):
        assert answer == pytest.approx(vector, rel=1e-9)


def test_an_engine_of_texts_steps_within_its_tokens_and_cancels():
    model = build_model(tiny_run(ENCODER), ParallelMesh.single())
    reason = why_reading_only(model.spec)
    assert reason is not None and "continue text: its attention layers have no state" in reason
    engine = EncoderEngine(model, None, EngineOptions(max_step_tokens=9), reads_only=reason)
    params = SamplingParams(max_new_tokens=0, pooling="mean")
    first, second, third, fourth = (engine.submit(text, params) for text in TEXTS)
    engine.cancel(third)
    engine.cancel(third)
    assert engine.stats.waiting == 3
    assert [event.request for event in engine.step()] == [third, first] and engine.take(third).pooled is None
    assert [event.request for event in engine.step()] == [second], "one text that is longer than a step"
    assert [event.request for event in engine.step()] == [fourth] and not engine.has_work
    with pytest.raises(DataError, match="does not continue text"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=3))
    with pytest.raises(DataError, match="does not continue text"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=0))
    with pytest.raises(DataError, match=r"vocabulary has 37 ids"):
        engine.submit([1, 37], params)
    with pytest.raises(DataError, match="65 tokens, but the model has 64 positions"):
        engine.submit([1] * 65, params)
    with pytest.raises(DataError, match="does not continue text"):
        Engine(model)


def test_texts_that_cannot_be_read_are_refused():
    model = build_model(tiny_run(ENCODER), ParallelMesh.single())
    with pytest.raises(DataError, match="Text 2 is empty"):
        pooled_states(model, [[1], []])
    with pytest.raises(DataError, match="65 tokens, but the model reads 64"):
        pooled_states(model, [[1] * 65])
    with pytest.raises(DataError, match=r"ids 0..0, but|ids 1..40, but"):
        pooled_states(model, [[1, 40]])
    with pytest.raises(DataError, match=r"Text 2 has no mask \(id 9\)"):
        fill_masks(model, [[9], [1, 2]], mask_id=9)
    for top_k in (0, 38):
        with pytest.raises(ConfigError, match=r"is not in 1..37"):
            fill_masks(model, [[9]], mask_id=9, top_k=top_k)
