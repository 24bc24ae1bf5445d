"""Ranks of their own draw while others train: the answers are those of --rollout-staleness, also after a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import petatron
from petatron.base.errors import ConfigError
from petatron.config import LoadedConfig
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.comm_record import CommEvent
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.run_posttraining import RolloutSource
from petatron.train.check_and_open_run import check_start
from petatron.train.train_step import train_step
from tests.dist import RankPool
from tests.longform import later
from tests.nccl_rules.order_check import order_problems
from tests.unit.posttrain.rollouts import (
    REWARD,
    TINY,
    Learned,
    drawing_mesh,
    learn,
    learn_or_draw,
    load,
    open_here,
    write_prompts,
)
from tests.unit.posttrain.test_rollout_loader import check_equal

ZERO = "--dp 2 --use-distributed-optimizer --overlap-param-gather"
FSDP = "--dp 2 --data-parallel-sharding-strategy optim_grads_params"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[Learned]:
    return learn(load(f"--rollout-prompts {prompts} --rollout-staleness 1"), 4)


def of_training(
    ranks: RankPool, flags: str, world_size: int, *, drawing: int, steps: int = 4, save_after: int | None = None
) -> list[list[Learned]]:
    """What each rank that trains has learned."""
    loaded = load(f"{flags} --rollout-ranks {drawing}", world_size=world_size)
    learned = ranks.run(partial(learn_or_draw, save_after=save_after), world_size, loaded, steps)
    assert learned[world_size - drawing :] == [[]] * drawing
    return learned[: world_size - drawing]


@pytest.mark.parametrize(
    ("layout", "world_size", "drawing"),
    [
        ("", 2, 1),
        ("--tp 2 --rollout-tp 1", 4, 2),
        later("--pp 2 --rollout-tp 2", 4, 2),
        later("--pp 2 --rollout-pp 2", 4, 2),
        later(f"{FSDP}", 3, 1),
        later("--cp 2", 3, 1),
    ],
)
def test_answers_are_those_of_ranks_that_draw_and_train(
    ranks: RankPool, prompts: Path, alone: list[Learned], layout: str, world_size: int, drawing: int
):
    flags = f"--rollout-prompts {prompts} --rollout-staleness 1 {layout}"
    for learned in of_training(ranks, flags, world_size, drawing=drawing):
        check_equal(learned, alone)


@pytest.mark.parametrize(
    "flags",
    [
        "--rollout-staleness 2 --updates-per-rollout 2",
        later("--rollout-staleness 1 --redraw-equal-rewards 2"),
        later("--rollout-staleness 1 --rollout-epochs 2"),
        later("--rollout-staleness 3"),
    ],
)
def test_answers_are_drawn_as_far_ahead_as_is_said(ranks: RankPool, prompts: Path, flags: str):
    flags = f"--rollout-prompts {prompts} {flags}"
    check_equal(of_training(ranks, flags, 2, drawing=1)[0], learn(load(flags), 4))


def test_a_resumed_run_has_the_answers_that_were_being_drawn(
    ranks: RankPool, prompts: Path, alone: list[Learned], tmp_path: Path
):
    """With ranks that draw, or without them: what a checkpoint has does not depend on it."""
    flags = f"--rollout-prompts {prompts} --rollout-staleness 1 --save {tmp_path}/run"
    check_equal(of_training(ranks, flags, 2, drawing=1, steps=2, save_after=2)[0], alone[:2])
    resumed = f"{flags} --load {tmp_path}/run"
    check_equal(of_training(ranks, resumed, 2, drawing=1, steps=2)[0], alone[2:])
    check_equal(learn(load(resumed), 2), alone[2:])


@pytest.mark.parametrize(("layout", "world_size"), [("", 2), later("--rollout-tp 2 --tp 2", 4)])
def test_weights_that_are_handed_over_in_flight_keep_the_staleness(
    ranks: RankPool, prompts: Path, tmp_path: Path, layout: str, world_size: int
):
    """Which weights draw a token depends on time; every group of answers is learned from once, in their order, and none too late."""
    flags = f"--rollout-prompts {prompts} --rollout-staleness 2 --rollout-in-flight --save {tmp_path}/run {layout} --max-answer-tokens 15"
    flags += " --rollout-log-gigabytes 1"
    for options in ("", f"--load {tmp_path}/run"):
        loaded = f"{flags} {options}"
        for learned in of_training(ranks, loaded, world_size, drawing=world_size // 2, steps=3, save_after=3):
            assert all(0 < step.grad_norm < 100 and step.metrics["rollout k3"] < 1 for step in learned)
    groups = []
    for file in sorted((tmp_path / "run" / "rollouts").iterdir()):
        answers = [json.loads(line) for line in file.read_text().splitlines()]
        iteration = int(file.stem.removeprefix("iteration-"))
        assert all(iteration - 1 - answer["version"] <= 2 for answer in answers)
        groups += sorted({answer["group"] for answer in answers})
    assert groups == list(range(len(groups))) and len(groups) == 8 * 4, "six steps, and two that wait"


def test_weights_change_between_two_tokens():
    """Tokens before the change are those of the former weights; a prompt that comes later finds nothing of theirs in the cache."""
    run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    options = EngineOptions(page_size=4, copied_weights=False)
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0)
    prompt = list(range(1, 14))
    models = [petatron.build_model(run, petatron.launch(run)) for _ in range(2)]
    scale_weights(models[1])
    [[former]], [[later_on]] = (Engine(model, options=options).complete([prompt], sampling) for model in models)
    engine = Engine(models[0], options=options)
    steps = iter(range(100))

    def change() -> None:
        if next(steps) == 5:
            scale_weights(models[0])
            engine.forget_prefixes()

    engine.between_steps = change
    [[mixed]] = engine.complete([prompt], sampling)
    assert mixed.ids[:5] == former.ids[:5] and mixed.ids != former.ids
    [[fresh]] = engine.complete([prompt], sampling)
    assert fresh.ids == later_on.ids and [x.logprob for x in fresh.logprobs] == [x.logprob for x in later_on.logprobs]


def recorded(loaded: LoadedConfig) -> list[CommEvent]:
    """On a rank: the communication of two steps, but for orders, which a thread receives."""
    run, rank = loaded.config, dist.get_rank()
    if rank < run.parallel.world_size:
        opened = open_here(loaded)
        for _ in range(2):
            batches = opened.loaders.train.next_step(16, opened.state.progress.consumed_samples)
            train_step(opened.state, batches, num_samples=16)
        opened.loaders.train.close()
        record = opened.state.mesh.record
    else:
        mesh = drawing_mesh(run)
        RolloutSource(check_start(loaded)).draw_for_others(mesh)
        record = mesh.record
    return [event for event in record.events() if not event.axis.endswith("background_control")]


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --pp 2 --rollout-tp 4 --rollout-pp 1",
        "--tp 2 --rollout-ranks 2 --rollout-tp 2 --rollout-staleness 1",
        later(f"{ZERO} --rollout-ranks 2 --rollout-pp 2 --rollout-staleness 2 --rollout-in-flight"),
        later(f"{FSDP} --pp 2 --rollout-tp 2 --rollout-pp 1"),
    ],
)
def test_communication_has_one_order(ranks: RankPool, prompts: Path, flags: str):
    """So NCCL, which buffers nothing, cannot wait for ever."""
    records = ranks.run(recorded, 4, load(f"--rollout-prompts {prompts} {flags}", world_size=4))
    assert any(event.op == "all_to_all" for event in records[0]), "weights were handed over"
    assert not order_problems(records)


def scale_weights(model: ParallelModel) -> None:
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(parameter.flip(0) * 3)


def test_a_run_of_the_command_line_evaluates_stops_and_goes_on(prompts: Path, tmp_path: Path):
    """Ranks that draw outlive a signal, since those that train wait for their answers before they save."""
    flags = f"{TINY} --rewards {REWARD} --rollout-prompts {prompts} --eval-prompts {prompts} --eval-interval 2 --log-interval 1"
    flags += f" --device cpu --save {tmp_path}/run --rollout-staleness 1 --rollout-ranks 1 --train-iters 100000 --lr-decay-iters 9"
    command = [sys.executable, "-m", "petatron", "posttrain", "grpo", *flags.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    metrics, began = tmp_path / "run" / "metrics.jsonl", time.monotonic()
    while not (metrics.exists() and metrics.read_text().count("draw s") > 3) and time.monotonic() - began < 60:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "1 rank of their own that draw" in output, output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["objective_metrics"] for line in lines if "wait s" in (line.get("objective_metrics") or {})]
    assert len(steps) > 3 and any("held-out prompts" in json.dumps(line) for line in lines)
    assert list((tmp_path / "run").glob("step-*")), "it has saved"


REFUSED = {
    "--rollout-ranks 1": "with --rollout-staleness 0 each would wait for the other. Add --rollout-staleness 1",
    "--rollout-ranks 1 --rollout-staleness 1 --advantage gae": "--advantage gae needs a model that judges answers where they are drawn",
    "--rollout-ranks 2 --rollout-staleness 1": "--rollout-ranks 2 leaves no rank that trains",
    "--rollout-ranks 1 --rollout-staleness 1 --rollout-tp 2": "makes tp 2 x pp 1 = 2, which does not divide the 1 ranks that draw",
    "--rollout-ranks 1 --rollout-staleness 1 --nproc-per-node 3": "= 3 is not the world size 2",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_ranks_that_cannot_draw_are_refused(prompts: Path, flags: str):
    with pytest.raises(ConfigError) as refused:
        load(f"--rollout-prompts {prompts} {flags}", world_size=2)
    assert REFUSED[flags] in str(refused.value)


def test_a_reference_that_judges_answers_is_refused(prompts: Path):
    flags = f"--rollout-prompts {prompts} --rollout-ranks 1 --rollout-staleness 1 --objective-settings kl_in_reward=0.1"
    with pytest.raises(ConfigError, match=r"kl_in_reward=0\.1 is computed by a reference that ranks which draw alone"):
        RolloutSource(check_start(load(flags, world_size=2)))
