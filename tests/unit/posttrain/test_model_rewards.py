"""A reward model scores what was drawn as it scores texts in its own training, in every layout of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import petatron
from petatron.base.errors import CheckpointError
from petatron.data.conversations.preferences_kind import _scored_rows
from petatron.mesh.mesh import ParallelMesh
from petatron.models.preference_objectives import PairwiseReward
from petatron.posttrain.rewards.model_rewards import RewardModel
from petatron.posttrain.rollout import Rollout
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import tiny_run
from tests.unit.posttrain.rollouts import learn, load, open_here, rollout, write_prompts
from tests.unit.posttrain.test_rollout_loader import check_equal

SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 24 --vocab-size 257 --make-vocab-size-divisible-by 1"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = "--pooling last --num-labels 1 --objective reward --fp64"
    folder = tmp_path_factory.mktemp("scorer")
    petatron.build_model(tiny_run(f"{head} {SHAPE} --seed 5", dtype="float64"), ParallelMesh.single()).save_pretrained(
        folder
    )
    return folder


def drawn(flags: str) -> list[Rollout]:
    """The answers of the second step of a run, which wait."""
    opened = open_here(load(f"{flags} --updates-per-rollout 2"))
    state = next(component for component in opened.state.added_components if component.name == "rollouts")
    opened.loaders.train.next_step(16, 0)
    opened.loaders.train.close()
    return state.waiting[0]  # pyright: ignore[reportAttributeAccessIssue]


def test_scores_are_those_of_the_objective_and_of_transformers(prompts: Path, scorer: Path):
    rollouts = drawn(f"--rollout-prompts {prompts} --rewards 0.5*model:{scorer} exact")
    model = petatron.from_pretrained(scorer, ParallelMesh.single(), gradients=False)
    batch = _scored_rows([rollout.segment() for rollout in rollouts], 24, 0, "last")
    [outputs] = model.forward([batch], collect=PairwiseReward().outputs)
    theirs = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float64, pad_token_id=0).eval()
    for rollout_, score in zip(rollouts, outputs["label_logits"].squeeze(1).tolist(), strict=True):
        exact = float(rollout_.text.strip() == str(rollout_.prompt))
        assert rollout_.reward == pytest.approx(0.5 * score + exact, abs=1e-9)
        ids = torch.tensor([[*rollout_.prompt_ids, *rollout_.ids]])
        with torch.no_grad():  # its rotary tables are in float32
            assert theirs(ids).logits.item() == pytest.approx(score, abs=1e-7)
    assert np.std([rollout_.reward for rollout_ in rollouts]) > 0


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        later("--tp 2 --dp 2", 4),
    ],
)
def test_every_layout_has_the_same_scores(ranks: RankPool, prompts: Path, scorer: Path, layout: str, world_size: int):
    flags = f"--rollout-prompts {prompts} --rewards model:{scorer}"
    alone = learn(load(flags), 2)
    for learned in ranks.run(learn, world_size, load(f"{flags} {layout}", world_size=world_size), 2):
        check_equal(learned, alone)


def test_the_end_of_a_long_text_is_scored(prompts: Path, scorer: Path):
    loaded = load(f"--rollout-prompts {prompts}")
    model = RewardModel(loaded.config, open_here(loaded).state.model, str(scorer))
    ids = [*rollout().prompt_ids, *range(3, 40)]
    whole_and_end = model.scores([ids, ids[-24:], ids[-23:]])
    assert whole_and_end[0] == whole_and_end[1] != whole_and_end[2]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--pooling last --num-labels 2 --objective classification", "has no task head with one label"),
        ("", "has no task head with one label"),
        ("--vocab-size 255 --pooling last --num-labels 1 --objective reward", "has 255 token ids"),
    ],
)
def test_a_model_that_scores_nothing_is_refused(prompts: Path, tmp_path: Path, flags: str, text: str):
    petatron.build_model(tiny_run(f"{SHAPE} {flags}"), ParallelMesh.single()).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=text):
        open_here(load(f"--rollout-prompts {prompts} --rewards model:{tmp_path}/other"))
