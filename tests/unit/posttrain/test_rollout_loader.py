"""A run learns from the same answers in every layout, and when it is resumed; what cannot be rewarded is left out."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import petatron
from petatron.base.errors import ConfigError, DataError, TrainError
from petatron.mesh.mesh import ParallelMesh
from petatron.posttrain.rollout_log import RolloutLog
from petatron.posttrain.run_posttraining import RolloutSource
from petatron.train.check_and_open_run import check_start
from petatron.train.run_training import run_training
from tests.dist import RankPool
from tests.longform import later
from tests.unit.posttrain.rollouts import Learned, learn, load, open_here, rollout, write_prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[Learned]:
    return learn(load(f"--rollout-prompts {prompts}"))


def check_equal(learned: list[Learned], wanted: list[Learned]) -> None:
    for ours, other in zip(learned, wanted, strict=True):
        assert ours.loss == pytest.approx(other.loss, abs=1e-9)
        assert ours.grad_norm == pytest.approx(other.grad_norm, rel=1e-7)
        assert ours.metrics == pytest.approx(other.metrics, abs=1e-7)


def test_answers_that_are_rewarded_become_likelier(prompts: Path):
    learned = learn(load(f"--rollout-prompts {prompts} --lr 1e-2 --lr-decay-style constant"), steps=16)
    assert learned[0].metrics["reward"] < 0.4 < 0.9 < learned[-1].metrics["reward"]
    assert all(step.metrics["rollout difference"] < 1e-6 for step in learned), "the engine computes as training does"


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --sequence-parallel", 2),
        ("--pp 2", 2),
        ("--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", 2),
        later("--tp 2", 2),
        later("--tp 2 --pp 2 --sequence-parallel", 4),
        later("--dp 2 --tp 2", 4),
    ],
)
def test_every_layout_learns_from_the_same_answers(
    ranks: RankPool, prompts: Path, alone: list[Learned], layout: str, world_size: int
):
    for learned in ranks.run(learn, world_size, load(f"--rollout-prompts {prompts} {layout}", world_size=world_size)):
        check_equal(learned, alone)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--rollout-temperature 0.7", 1),
        ("--tp 2 --sequence-parallel", 2),
        later("--pp 2", 2),
        later("--dp 2 --rollout-temperature 1.5", 2),
    ],
)
def test_exact_log_probabilities_are_those_of_training(ranks: RankPool, prompts: Path, flags: str, world_size: int):
    """In float32, where others differ by rounding."""
    exact = load(f"--rollout-prompts {prompts} --exact-rollouts {flags} --no-fp64", world_size=world_size)
    for learned in ranks.run(learn, world_size, exact) if world_size > 1 else [learn(exact)]:
        assert [step.metrics["rollout difference"] for step in learned] == [0.0] * 3
        assert [step.metrics["rollout k3"] for step in learned] == [0.0] * 3


@pytest.mark.parametrize("flags", ["", "--updates-per-rollout 2 --rollout-keep-engine", "--rollout-staleness 2"])
def test_a_resumed_run_learns_from_the_answers_that_it_would_have(prompts: Path, tmp_path: Path, flags: str):
    """Saved in the middle of the steps that learn from answers that were drawn at once, or before they are due."""
    save = f"--rollout-prompts {prompts} --save {tmp_path}/run {flags}"
    whole = learn(load(save), steps=5, save_after=3)
    check_equal(learn(load(f"{save} --load {tmp_path}/run"), steps=2), whole[3:])


def test_stale_answers_were_drawn_by_former_weights(prompts: Path):
    opened = open_here(load(f"--rollout-prompts {prompts} --rollout-staleness 2"))
    loader = opened.loaders.train
    loader.next_step(16, 0)
    source_state = next(x for x in opened.state.added_components if x.name == "rollouts")
    waiting = source_state.waiting  # pyright: ignore[reportAttributeAccessIssue]
    assert [step[0].version for step in waiting] == [0, 0] and len(waiting[0]) == 16
    opened.state.progress.iteration = 1
    loader.next_step(16, 16)
    assert [step[0].version for step in waiting] == [0, 1]
    loader.close()


def test_a_student_learns_its_teacher_on_its_own_answers(prompts: Path, tmp_path: Path):
    """The teacher is itself with other weights; no reward is needed, and none is there."""
    teacher = load(f"--rollout-prompts {prompts} --seed 99").config
    petatron.save_checkpoint(
        tmp_path / "teacher",
        step=1,
        model=petatron.build_model(
            replace(teacher, train=replace(teacher.train, objective=None, objective_settings=())), ParallelMesh.single()
        ),
    )
    flags = f"--rollout-prompts {prompts} --lr 2e-2 --lr-decay-style constant --objective-settings teacher={tmp_path}/teacher"
    loaded = load(flags, "distill")
    loaded = replace(loaded, config=replace(loaded.config, rollout=replace(loaded.config.rollout, rewards=())))
    learned = learn(loaded, steps=8)
    assert learned[-1].loss < 0.7 * learned[0].loss and "reward" not in learned[0].metrics


def test_every_prompt_is_answered_once_in_an_epoch(prompts: Path):
    opened = open_here(load(f"--rollout-prompts {prompts} --global-batch-size 24"))
    state = next(x for x in opened.state.added_components if x.name == "rollouts")
    opened.loaders.train.next_step(24, 0)
    assert state.groups == 6  # pyright: ignore[reportAttributeAccessIssue]
    opened.loaders.train.close()


def test_prompts_of_equal_rewards_are_drawn_again(prompts: Path):
    opened = open_here(load(f"--rollout-prompts {prompts} --rewards regex:.* --redraw-equal-rewards 2"))
    state = next(x for x in opened.state.added_components if x.name == "rollouts")
    batches = opened.loaders.train.next_step(16, 0)
    assert state.groups == 12, "three rounds of four prompts"  # pyright: ignore[reportAttributeAccessIssue]
    assert all(bool((batch["advantages"] == 0).all()) for batch in batches)
    opened.loaders.train.close()


def test_an_answer_without_a_reward_is_left_out():
    with_reward, without = rollout(advantage=2.0), rollout(reward=math.nan)
    assert with_reward.segment().of_ids["advantages"].tolist() == [0, 0, 2, 2]
    assert without.segment().learned.tolist() == [0, 0, 0, 0] and not without.segment().counted
    assert np.allclose(with_reward.segment().of_ids["drawn_log_probs"], [0, 0, -0.5, -0.5])


def test_a_failing_reward_costs_its_answers(prompts: Path, tmp_path: Path):
    function = tmp_path / "reward.py"
    function.write_text("def reward(answer, record):\n    return 1 / (int(record['answer']) % 2)\n")
    opened = open_here(
        load(f"--rollout-prompts {prompts} --rewards {function}:reward --global-batch-size 24 --reward-workers 1")
    )
    batches = opened.loaders.train.next_step(24, 0)
    counted = torch.cat([batch["segment_mask"] for batch in batches])
    assert counted.sum() == 12, "half of the prompts have an answer that cannot be rewarded"
    opened.loaders.train.close()
    function.write_text("def reward(answer, record):\n    raise ValueError('no')\n")
    opened = open_here(load(f"--rollout-prompts {prompts} --rewards {function}:reward --reward-workers 1"))
    with pytest.raises(
        TrainError, match=r"None of the 16 answers of a step could be rewarded; most often: .*ValueError: no"
    ):
        opened.loaders.train.next_step(16, 0)
    opened.loaders.train.close()


def test_every_answer_is_written_and_the_oldest_are_removed(tmp_path: Path):
    log = RolloutLog(tmp_path, gigabytes=1000 / (1 << 30))
    for iteration in (1, 2, 3):
        log.write(iteration, [rollout("ü" * 100, reward=math.nan)], ["prompt"])
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["iteration-000002.jsonl", "iteration-000003.jsonl"]
    record = json.loads((tmp_path / "rollouts" / names[-1]).read_text())
    assert record["text"] == "ü" * 100 and record["reward"] is None and record["prompt_text"] == "prompt"
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"Cannot write answers to .*--rollout-log-gigabytes 0"):
        RolloutLog(tmp_path / "file", gigabytes=1.0).write(1, [rollout()], ["prompt"])


REFUSED = {
    "--rewards exakt": "--rewards exakt is no reward. Did you mean exact",
    "--rewards 2*exact:answer 0.5*none.py:f": "names the file none.py, which does not exist",
    "--rewards regex:(": "has a regular expression that cannot be read",
    "--rewards regex": "has no regular expression",
    "--global-batch-size 6 --micro-batch-size 1": "is not a multiple of --rollouts-per-prompt 4. Use 4",
    "--max-answer-tokens 30": "leaves no room for a prompt in --seq-length 24",
    "--rollouts-per-prompt 1": "leaves --advantage group nothing to measure a reward against. Use 2 or more",
    "--advantage gae --redraw-equal-rewards 1": "and a critic learns from those too",
    "--objective-settings kl_in_reward=-1": "kl_in_reward=-1.0 is below 0",
    "--objective-settings entropy_weight=-1": "entropy_weight=-1.0 is below 0",
    "--objective-settings mask_tokens_above=0.5": "mask_tokens_above=0.5 is not above 1",
    "--objective-settings mask_answers_above=1": "mask_answers_above=1.0 is not above 1",
    "--advantage gae --model-type t5": "trains a critic, and --model-type t5 has no head for values",
    "--objective-settings ratio=word": "ratio=word is no choice. Use one of token, sequence, product.",
    "--objective-settings clip_hihg=1": "Did you mean clip_high?",
    "--objective-settings unbiased_kl=no": "unbiased_kl=no is no choice. Use one of true, false.",
    "--rollouts-per-prompt 0": "--rollouts-per-prompt 0 is below 1",
    "--rollout-tp 0": "--rollout-tensor-model-parallel-size 0 is below 1",
    "--rollout-chat": "needs a chat template, and the tokenizer has none",
    "--rampup-batch-size 8 8 64": "changes how many answers a step has",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_is_told_before_anything_is_built(prompts: Path, flags: str):
    with pytest.raises(ConfigError) as refused:
        RolloutSource(check_start(load(f"--rollout-prompts {prompts} {flags}")))
    assert REFUSED[flags] in str(refused.value)


def test_another_objective_cannot_learn_from_answers(prompts: Path):
    loaded = load(f"--rollout-prompts {prompts}")
    run = loaded.config
    other = replace(run, train=replace(run.train, objective=None, objective_settings=()))
    with pytest.raises(ConfigError, match="is no objective of drawn answers"):
        RolloutSource(check_start(replace(loaded, config=other)))
    without = replace(run, rollout=replace(run.rollout, rollout_prompts=()))
    with pytest.raises(ConfigError, match="nothing is to be answered"):
        RolloutSource(check_start(replace(loaded, config=without)))


def test_what_is_stored_of_a_teacher_is_not_of_answers(prompts: Path):
    flags = f"--rollout-prompts {prompts} --objective-settings mix=0.5 stored=folder"
    with pytest.raises(ConfigError, match=r"stored=folder is of the rows of files.*Give teacher=FOLDER"):
        RolloutSource(check_start(load(flags, "distill")))


def test_rewards_that_teach_nothing_are_told(prompts: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        learn(load(f"--rollout-prompts {prompts} --rewards regex:@@@"), steps=1)
    assert "WARNING: iteration 1 learns nothing from rewards" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        learn(load(f"--rollout-prompts {prompts}"), steps=1)
    assert "learns nothing" not in caplog.text


def test_lines_that_are_no_prompts_are_named(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    lines = ["[1]", '{"question": "a"}', '{"prompt": "a", "prompt": "b"}', "{", json.dumps({"prompt": "a" * 30})]
    file.write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        RolloutSource(check_start(load(f"--rollout-prompts {file}")))
    for number, text in enumerate(
        (
            "a JSON list, not an object",
            "its keys: question",
            "is there twice",
            "line 4",
            "has 30 tokens, and --seq-length leaves 20",
        ),
        1,
    ):
        assert f"line {number}: " in str(refused.value) and text in str(refused.value)
    file.write_text("\n")
    with pytest.raises(DataError, match=r"has no prompts\. Give lines such as"):
        RolloutSource(check_start(load(f"--rollout-prompts {file}")))
    with pytest.raises(DataError, match="does not exist"):
        RolloutSource(check_start(load(f"--rollout-prompts {tmp_path}/none")))


def test_prompts_are_of_posttraining_alone(prompts: Path):
    with pytest.raises(ConfigError, match="are answered and learned from by petatron posttrain"):
        run_training(load(f"--rollout-prompts {prompts}"))
    with pytest.raises(ConfigError, match="--rollout-prompts is not set"):
        load("")
    with pytest.raises(ConfigError, match="--mock-data cannot be combined with --rollout-prompts"):
        load(f"--rollout-prompts {prompts} --mock-data")
