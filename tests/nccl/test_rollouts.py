"""Answers that are drawn on a GPU and learned from, over NCCL: the same in every layout, and exact where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.unit.posttrain.rollouts import SEVERAL, learn, learn_or_draw, load, write_prompts

LAYOUTS = {
    "": 1,
    "--tp 2 --sequence-parallel": 2,
    "--pp 2": 2,
    "--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--tp 2 --pp 2 --dp 2 --sequence-parallel": 8,
    "--tp 2 --pp 2 --sequence-parallel --rollout-tp 4 --rollout-pp 1": 4,
    "--pp 2 --rollout-pp 1 --rollout-keep-engine": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params --rollout-tp 2": 2,
    "--cp 2": 2,
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_of_one_process(gpu_ranks: RankPool, prompts: Path, layout: str):
    alone = learn(load(f"--rollout-prompts {prompts} --device cpu"))
    flags = f"--rollout-prompts {prompts} {layout}"
    for learned in gpu_ranks.run(learn, LAYOUTS[layout], load(flags, world_size=LAYOUTS[layout]), timeout_s=120):
        for ours, other in zip(learned, alone, strict=True):
            assert ours.loss == pytest.approx(other.loss, abs=1e-9)
            assert ours.grad_norm == pytest.approx(other.grad_norm, rel=1e-7)
            assert ours.metrics == pytest.approx(other.metrics, abs=1e-7)


@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel", "--pp 2", "--cp 2"])
def test_a_critic_is_that_of_one_process(gpu_ranks: RankPool, prompts: Path, layout: str):
    flags = f"--rollout-prompts {prompts} {SEVERAL}"
    alone, loaded = (
        learn(load(f"{flags} --device cpu", "ppo")),
        load(f"{flags} {layout}", "ppo", world_size=LAYOUTS[layout]),
    )
    for learned in gpu_ranks.run(learn, LAYOUTS[layout], loaded, timeout_s=120):
        for ours, other in zip(learned, alone, strict=True):
            assert ours.loss == pytest.approx(other.loss, abs=1e-9)
            assert ours.metrics["value loss"] == pytest.approx(other.metrics["value loss"], abs=1e-9)
            assert ours.metrics == pytest.approx(other.metrics, abs=1e-7)


@pytest.mark.parametrize(
    ("layout", "world_size"), [("--rollout-ranks 1", 2), ("--tp 2 --pp 2 --rollout-ranks 4 --rollout-tp 2", 8)]
)
def test_ranks_that_draw_give_the_same_answers(gpu_ranks: RankPool, prompts: Path, layout: str, world_size: int):
    flags = f"--rollout-prompts {prompts} --rollout-staleness 1"
    alone = learn(load(f"{flags} --device cpu"))
    for learned in gpu_ranks.run(
        learn_or_draw, world_size, load(f"{flags} {layout}", world_size=world_size), timeout_s=120
    ):
        for ours, other in zip(learned, alone):
            assert ours.loss == pytest.approx(other.loss, abs=1e-9)
            assert ours.grad_norm == pytest.approx(other.grad_norm, rel=1e-7)


def test_weights_are_handed_over_in_flight(gpu_ranks: RankPool, prompts: Path):
    flags = "--rollout-staleness 2 --tp 2 --rollout-ranks 2 --rollout-tp 2 --rollout-in-flight --max-answer-tokens 15"
    loaded = load(f"--rollout-prompts {prompts} {flags}", world_size=4)
    for learned in gpu_ranks.run(learn_or_draw, 4, loaded, timeout_s=120)[:2]:
        assert all(0 < step.grad_norm < 100 and step.metrics["rollout k3"] < 1 for step in learned)


@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel", "--pp 2"])
@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_exact_log_probabilities_are_those_of_training(gpu_ranks: RankPool, prompts: Path, layout: str, precision: str):
    world_size = LAYOUTS[layout]
    flags = f"--rollout-prompts {prompts} --exact-rollouts --no-fp64 {precision} {layout}"
    for learned in gpu_ranks.run(learn, world_size, load(flags, world_size=world_size), timeout_s=120):
        assert [step.metrics["rollout difference"] for step in learned] == [0.0] * 3


@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel"])
def test_engines_that_wait_draw_the_answers_of_new_ones(gpu_ranks: RankPool, prompts: Path, layout: str):
    """In bfloat16, whose decode steps have GEMMs of their own, which training must not see."""
    world_size = LAYOUTS[layout]
    sizes = "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512"
    flags = f"--rollout-prompts {prompts} --no-fp64 --bf16 {sizes} {layout}"
    kept, given_back = (
        gpu_ranks.run(learn, world_size, load(f"{flags} {more}", world_size=world_size), timeout_s=120)[0]
        for more in ("--rollout-keep-engine", "")
    )
    assert [step.metrics for step in kept] == [step.metrics for step in given_back]
    assert all(0 < step.metrics["rollout difference"] < 0.02 for step in kept)
