"""A critic learns beside the model, the same in every layout and after a resume; what its advantages are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import petatron
from petatron.base.errors import ConfigError
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.critic import Critic, critic_config
from petatron.posttrain.rollout_batches import RolloutPacking
from petatron.posttrain.token_advantages import generalized_advantages, whitened
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import tiny_run
from tests.unit.posttrain.rollouts import (
    SEVERAL,
    Learned,
    learn,
    load,
    open_here,
    rollout,
    write_environment,
    write_prompts,
)
from tests.unit.posttrain.test_environments import ROOM
from tests.unit.posttrain.test_rollout_loader import check_equal


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[Learned]:
    return learn(load(f"--rollout-prompts {prompts} {SEVERAL}", "ppo"))


def test_answers_that_are_rewarded_become_likelier(prompts: Path):
    learned = learn(load(f"--rollout-prompts {prompts} --lr 1e-2 --lr-decay-style constant", "ppo"), steps=16)
    assert learned[0].metrics["reward"] < 0.4 < 0.8 < learned[-1].metrics["reward"]
    assert learned[-1].metrics["value loss"] < 0.5 * learned[0].metrics["value loss"]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        ("--cp 2", 2),
        later("--tp 2", 2),
        later("--tp 2 --pp 2 --sequence-parallel", 4),
        later("--dp 2 --tp 2", 4),
    ],
)
def test_every_layout_has_the_same_critic(
    ranks: RankPool, prompts: Path, alone: list[Learned], layout: str, world_size: int
):
    loaded = load(f"--rollout-prompts {prompts} {SEVERAL} {layout}", "ppo", world_size=world_size)
    for learned in ranks.run(learn, world_size, loaded):
        check_equal(learned, alone)
        for ours, other in zip(learned, alone, strict=True):
            for name in ("value loss", "value grad norm", "explained variance"):
                assert ours.metrics[name] == pytest.approx(other.metrics[name], abs=1e-9, rel=1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        ("--num-experts 4 --moe-router-topk 2", "--ep 2", 2),
        ("--num-layers 4 --micro-batch-size 1", "--pp 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--rollout-temperature 0.7", "--tp 2 --sequence-parallel", 2),
        ("--rollout-temperature 0.7", "--cp 2", 2),
    ],
)
def test_other_models_have_the_same_critic(ranks: RankPool, prompts: Path, model: str, layout: str, world_size: int):
    flags = f"--rollout-prompts {prompts} {SEVERAL} {model}"
    wanted = learn(load(flags, "ppo"))
    for learned in ranks.run(learn, world_size, load(f"{flags} {layout}", "ppo", world_size=world_size)):
        check_equal(learned, wanted)


@pytest.mark.parametrize("precision", ["", "--no-fp64 --bf16"])
def test_a_resumed_run_has_its_critic(prompts: Path, tmp_path: Path, precision: str):
    """Saved in the middle of the steps that learn from answers that were drawn at once; in bf16 there are master weights."""
    save = f"--rollout-prompts {prompts} --save {tmp_path}/run {precision} {SEVERAL}"
    unbroken = learn(load(save, "ppo"), steps=4, save_after=1)
    check_equal(learn(load(f"{save} --load {tmp_path}/run", "ppo"), steps=3), unbroken[1:])


def test_turns_have_their_rewards(tmp_path: Path):
    """Of an environment whose rewards are those of turns; what it wrote is no step of the critic's."""
    prompts, environment = write_prompts(tmp_path / "prompts.jsonl"), write_environment(tmp_path / "early.py")
    opened = open_here(
        load(f"--rollout-prompts {prompts} --environment {environment}:Early --max-turns 3 {ROOM}", "ppo")
    )
    batches = opened.loaders.train.next_step(16, 0)
    for batch in batches:
        unlearned = batch.loss_mask == 0
        assert not any(bool(batch[name][unlearned].any()) for name in ("advantages", "returns", "old_values"))
        assert bool(batch["returns"][~unlearned].any())
    opened.loaders.train.close()


def test_advantages_are_discounted_sums_of_surprises():
    random, discount, decay = np.random.default_rng(1), 0.9, 0.8
    rewards = [random.normal(size=length) for length in (5, 0, 3)]
    values = [random.normal(size=len(x)) for x in rewards]
    for ours, r, v in zip(generalized_advantages(rewards, values, discount=discount, decay=decay), rewards, values):
        surprises = r + discount * np.append(v[1:], 0.0)[: len(v)] - v
        direct = [
            sum((discount * decay) ** (later - at) * surprises[later] for later in range(at, len(v)))
            for at in range(len(v))
        ]
        np.testing.assert_allclose(ours, direct, atol=1e-14)
    together = np.concatenate(whitened(rewards))
    assert together.mean() == pytest.approx(0, abs=1e-12) and together.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert [x.tolist() for x in whitened([np.ones(1)])] == [[0.0]]


def test_a_critic_starts_from_a_reward_model(prompts: Path, tmp_path: Path):
    """Its values are the scores of that model, of a text that ends there; without a folder, it has the run's start with a new head."""
    head = "--pooling last --num-labels 1 --objective reward --fp64"
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 257 --make-vocab-size-divisible-by 1"
    scorer = petatron.build_model(tiny_run(f"{head} {flags} --seed 5", dtype="float64"), ParallelMesh.single())
    scorer.save_pretrained(tmp_path / "scorer")
    loaded = load(f"--rollout-prompts {prompts} --critic {tmp_path}/scorer --critic-lr 1e-3", "ppo")
    critic = Critic(loaded.config, ParallelMesh.single(), init_weights=False)
    critic.start()
    segments = [rollout(ids=(8, 1, 4)).segment(), rollout(ids=(7,)).segment()]
    of_first, of_second = critic.values(segments, RolloutPacking(loaded.config, ParallelMesh.single().dp))
    tokens = torch.zeros(3, 24, dtype=torch.int64)
    weights = torch.zeros(3, 24)
    for row, ids in enumerate(([5, 6], [5, 6, 8], [5, 6, 8, 1])):
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, len(ids) - 1] = 1.0
    batch = petatron.Batch(tokens, arrays={"pooling_weights": weights})
    [scores] = scorer.forward([batch], collect=["label_logits"])
    np.testing.assert_allclose(of_first[2:], scores["label_logits"].squeeze(1).numpy(), atol=1e-12)
    assert of_second[2] == pytest.approx(of_first[2], abs=1e-12) and of_first[0] == 0
    assert critic_config(loaded.config, ParallelMesh.single()).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-labels 2 --vocab-size 257", "has a head of 2 labels, and a value is one"),
        ("--num-labels 1 --vocab-size 255", "has 255 token ids, and the model that is trained has 257"),
    ],
)
def test_a_model_that_is_no_critic_is_refused(prompts: Path, tmp_path: Path, flags: str, message: str):
    run = tiny_run(f"--pooling last --objective regression --make-vocab-size-divisible-by 1 {flags}")
    petatron.build_model(run, ParallelMesh.single()).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=message):
        open_here(load(f"--rollout-prompts {prompts} --critic {tmp_path}/other", "ppo"))


def test_a_run_gets_a_critic_when_it_is_resumed_with_one(prompts: Path, tmp_path: Path):
    """And leaves it when it is resumed without."""
    for algorithm, other in (("grpo", "ppo"), ("ppo", "grpo")):
        flags = f"--rollout-prompts {prompts} --save {tmp_path}/{algorithm}"
        learn(load(flags, algorithm), steps=1, save_after=1)
        opened = open_here(load(f"{flags} --load {tmp_path}/{algorithm}", other))
        said = (
            "weights of the critic start anew"
            if other == "ppo"
            else "weights of the critic of the checkpoint are not used"
        )
        assert any(said in change for change in opened.state.resume_changes)
        opened.loaders.train.close()


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_divergence_is_a_part_of_rewards(prompts: Path, tmp_path: Path, algorithm: str):
    """Of each token with a critic, and of an answer without; the reference is computed once, when answers are drawn."""
    reference = load(f"--rollout-prompts {prompts} --seed 7").config
    plain = replace(reference, train=replace(reference.train, objective=None, objective_settings=()))
    petatron.build_model(plain, ParallelMesh.single()).save_pretrained(tmp_path / "reference")
    settings = f"--objective-settings reference={tmp_path}/reference kl_in_reward=0.1 kl_estimator=k3"
    flags = f"--rollout-prompts {prompts} --save {tmp_path}/run --rollout-log-gigabytes 1 --rollouts-per-prompt 4"
    options = "--no-whiten-advantages --discount 0.9 --gae-lambda 0.8" if algorithm == "ppo" else ""
    learn(load(f"{flags} {settings} {options}", algorithm), steps=1)
    lines = (tmp_path / "run" / "rollouts" / "iteration-000001.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    scores = []
    for answer in answers:
        numbers = {name: np.array(x) for name, x in answer["of_ids"].items()}
        gap = numbers["reference_log_probs"] - np.array(answer["log_probs"])
        penalty = 0.1 * (np.expm1(gap) - gap)
        assert (penalty > 0).all()
        scores.append(answer["reward"] - penalty.sum())
        if algorithm == "ppo":
            rewards = -penalty
            rewards[-1] += answer["reward"]
            values = numbers["old_values"]
            [wanted] = generalized_advantages([rewards], [values], discount=0.9, decay=0.8)
            np.testing.assert_allclose(numbers["advantages"], wanted, atol=1e-6)
            np.testing.assert_allclose(numbers["returns"], wanted + values, atol=1e-6)
    if algorithm == "rloo":
        of_groups = np.array(scores).reshape(4, 4)
        wanted = of_groups - (of_groups.sum(axis=1, keepdims=True) - of_groups) / 3
        np.testing.assert_allclose([answer["advantage"] for answer in answers], wanted.reshape(-1), atol=1e-6)
