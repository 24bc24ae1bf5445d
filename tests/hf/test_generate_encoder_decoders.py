"""Encoder-decoders answer as those of transformers do: greedy, several prompts of different lengths at once, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import DataError
from petatron.evaluate.eval_task import ScoredTask
from petatron.infer.beam.beam_search import BeamParams, beam_search
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.serve.open_engine import CheckpointEngine, model_settings
from tests.dist import RankFailure, RankPool
from tests.hf.encoder_decoder_zoo import encoder_decoder_truth, saved
from tests.longform import diagonal, later

NEW_TOKENS = 20
PROMPTS = [[7, 9, 30, 12, 11], [8], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [5, 6, 5, 6]]
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)


def answers(folder: str, layout: dict[str, Any], options: dict[str, Any], flags: list[str]) -> list[list[int]]:
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout(**layout), rank)
    flags = ["--seq-length", "16", *flags, *["--sequence-parallel"] * (layout.get("tp", 1) > 1)]
    model = petatron.from_pretrained(folder, mesh, flags=flags, gradients=False, dtype="float32")
    engine = Engine(model, options=EngineOptions(decoder_start_id=0, **options))
    try:
        return [answer.ids for [answer] in engine.complete_on_all_ranks(PROMPTS, GREEDY)]
    finally:
        engine.release()


def expected(name: str) -> list[list[int]]:
    model = encoder_decoder_truth(name).model
    # Its cache has as many layers as the encoder has, which may be fewer than the decoder's.
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "decoder_start_token_id": 0, "eos_token_id": -1}
    options["use_cache"] = False
    return [model.generate(torch.tensor([prompt]), **options)[0, 1:].tolist() for prompt in PROMPTS]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "alone": ({}, {}, []),
    "two at a time": ({}, {"max_sequences": 2}, []),
    "preempted": ({}, {"page_size": 4, "num_pages": 12, "recorded_steps": False, "max_length": 24}, []),
    "tp2-sp": ({"tp": 2}, {}, []),
    "dp2": ({"dp_shard": 2}, {}, []),
}
AT_ONCE = {"t5": LAYOUTS, "t5-odd": ("alone",), "flan-t5-odd": ("alone", "tp2-sp")}


@diagonal(4)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout) if layout in AT_ONCE.get(name, ()) else later(name, layout)
        for name in ("t5", "t5-odd", "flan-t5", "flan-t5-odd", "mt5")
        for layout in LAYOUTS
    ],
)
def test_greedy_answers_are_those_of_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    sizes, options, flags = LAYOUTS[layout]
    args = (str(saved(name, tmp_path)), sizes, options, flags)
    found = ranks.run(answers, 2, *args) if sizes else [answers(*args)]
    assert all(rank == expected(name) for rank in found)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = saved("t5", tmp_path_factory.mktemp("folder"))
    model = petatron.from_pretrained(folder, flags=["--seq-length", "16"], gradients=False, dtype="float32")
    return Engine(model, options=EngineOptions(decoder_start_id=0, max_length=32))


REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "a prompt longer than the encoder's": (list(range(1, 18)), {}, "has 17 tokens, but the model has 16 positions"),
    "an answer longer than the decoder's": ([1], {"max_new_tokens": 32}, "decoder has 31 positions, not 32"),
    "predictions of the prompt": ([1], {"prompt_logprobs": 1}, "An encoder reads the prompt"),
    "nothing": ([], {}, "The prompt is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_encoder_decoder_cannot_answer_is_refused(engine: Engine, case: str):
    prompt, options, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        engine.submit(prompt, SamplingParams(**{"max_new_tokens": 4, **options}))


def test_beams_are_refused(engine: Engine):
    with pytest.raises(DataError, match="A beam search continues its prompts"):
        beam_search(engine, [[1, 2]], BeamParams(width=2, max_new_tokens=3))


class _Task(ScoredTask):
    def metrics(self, scores: Any) -> Any:
        raise AssertionError("nothing is scored")


def test_texts_are_not_scored_from_left_to_right(engine: Engine, tmp_path: Path):
    model = petatron.from_pretrained(saved("t5", tmp_path), gradients=False)
    with pytest.raises(DataError, match="predicts one text from another"):
        _Task().run(model)


def test_the_first_token_of_answers_must_be_known(tmp_path: Path):
    model = petatron.from_pretrained(saved("t5", tmp_path), gradients=False)
    for options, message in (
        (EngineOptions(), "names no first token"),
        (EngineOptions(decoder_start_id=999), "999 is not"),
    ):
        with pytest.raises(DataError, match=message):
            Engine(model, options=options)


def test_stages_of_a_pipeline_are_refused(ranks: RankPool, tmp_path: Path):
    args = (str(saved("t5", tmp_path)), {"pp": 2}, {}, ["--encoder-pipeline-model-parallel-size", "1"])
    with pytest.raises(RankFailure, match="prompts are encoded on one"):
        ranks.run(answers, 2, *args)


def test_the_server_refuses_what_it_cannot_tell_apart(tmp_path: Path):
    with pytest.raises(DataError, match="Use petatron generate"):
        CheckpointEngine(model_settings(saved("t5", tmp_path)))
