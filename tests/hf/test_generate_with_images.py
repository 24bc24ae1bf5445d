"""Models that read images answer as those of transformers do: greedy, prompts with and without images at once, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import DataError
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool
from tests.hf.images_and_text_zoo import IMAGE_TOKEN, grids_of, inputs_of, samples, saved, settings, truth
from tests.longform import diagonal, later

NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
Prompt = tuple[list[int], PromptImages | None]


def prompts(name: str) -> list[Prompt]:
    config = settings(truth(name).model)
    made = [
        ([int(token) for token in sample["tokens"][: 24 + number]], PromptImages(sample["patches"], sample["grids"]))
        for number, sample in enumerate(samples(config, [grids[:1] for grids in grids_of(config)]))
    ]
    [first, second] = made
    # The tokens of the first with another image: what was computed of them must not be taken.
    turned = PromptImages(np.ascontiguousarray(first[1].patches[::-1]), first[1].grids)
    return [first, ([5, 6, 7], None), second, (first[0], turned), ([*second[0], 9, 8], second[1])]


def answers(folder: str, layout: dict[str, Any], options: dict[str, Any], given: list[Prompt]) -> list[list[int]]:
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout(**layout), rank)
    flags = ["--seq-length", "40", *["--sequence-parallel"] * (layout.get("tp", 1) > 1)]
    model = petatron.from_pretrained(folder, mesh, flags=flags, gradients=False, dtype="float32")
    engine = Engine(model, options=EngineOptions(**options))
    try:
        if rank != 0:
            engine.follow()
            return []
        requests = [engine.submit(ids, GREEDY, images=images) for ids, images in given]
        while engine.has_work:
            engine.step()
        return [engine.take(request).ids for request in requests]
    finally:
        engine.close() if rank == 0 else engine.release()


def expected(name: str) -> list[list[int]]:
    model, found = truth(name).model, []
    config = settings(model)
    for ids, images in prompts(name):
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if images is not None:
            sample = {"tokens": np.array([*ids, 0]), "patches": images.patches, "grids": images.grids}
            inputs = inputs_of(model, config, [sample])
        inputs["attention_mask"] = torch.ones(1, len(ids), dtype=torch.int64)  # else it is made from padding
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        found.append(model.generate(**inputs, **options)[0, len(ids) :].tolist())
    return found


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "not recorded": ({}, {"recorded_steps": False, "page_size": 4}),
    "short chunks": ({}, {"max_step_tokens": 7, "page_size": 4}),
    "preempted": ({}, {"page_size": 4, "num_pages": 24, "recorded_steps": False, "max_length": 44}),
    "tp2-sp": ({"tp": 2}, {}),
    "dp2": ({"dp_shard": 2}, {}),
}
AT_ONCE = {"qwen2.5-vl": LAYOUTS, "llava": ("alone", "tp2-sp"), "smolvlm": ("alone",)}


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout) if layout in chosen else later(name, layout)
        for name, chosen in AT_ONCE.items()
        for layout in LAYOUTS
    ],
)
def test_a_model_of_images_answers_as_that_of_transformers(ranks: RankPool, name: str, layout: str, tmp_path: Path):
    sizes, options = LAYOUTS[layout]
    args = (str(saved(name, tmp_path)), sizes, options, prompts(name))
    found = ranks.run(answers, 2, *args)[0] if sizes else answers(*args)
    assert found == expected(name)


def test_images_that_are_not_those_of_the_prompt_are_refused(tmp_path: Path):
    model = petatron.from_pretrained(saved("llava", tmp_path), flags=["--seq-length", "40"], gradients=False)
    engine = Engine(model)
    [first, *_] = prompts("llava")
    assert first[1] is not None
    with pytest.raises(DataError, match=r"The prompt has 9 image tokens \(130\), and its 0 images need 0"):
        engine.submit(first[0], GREEDY)
    with pytest.raises(DataError, match="has 1 image tokens"):
        engine.submit([3, IMAGE_TOKEN], GREEDY, images=first[1])
    with pytest.raises(DataError, match=r"should be \[9, 12\]"):
        engine.submit(first[0], GREEDY, images=PromptImages(first[1].patches[:4], first[1].grids))
    twice = PromptImages(np.concatenate([first[1].patches] * 2), np.concatenate([first[1].grids] * 2))
    with pytest.raises(DataError, match=r"have 20 patches, and the model reads 10 \(--max-patches\)"):
        engine.submit([*first[0], *[IMAGE_TOKEN] * 9], GREEDY, images=twice)


def test_a_model_of_text_takes_no_images():
    run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    engine = Engine(petatron.build_model(run, petatron.launch(run)))
    with pytest.raises(DataError, match="This model reads no images"):
        engine.submit([1, 2], GREEDY, images=PromptImages(np.zeros((1, 12), np.uint8), np.ones((1, 3), np.int64)))
