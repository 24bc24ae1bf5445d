"""Answers that are drawn in another layout than that of training are the same; the memory of the copied weights is given back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import ConfigError
from petatron.config import LoadedConfig, RunConfig
from petatron.config.rollout_layout import drawing_config
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.posttrain.handover.drawing_model import CopiedModel
from petatron.posttrain.handover.plan_handover import HeldBox, _Piece, _Tensor, _transfers, plan_handover
from petatron.posttrain.handover.weight_handover import WeightHandover
from petatron.posttrain.run_posttraining import run_posttraining
from petatron.pretrained.launch_and_build_model import build_initial_model
from petatron.sharding.boxes import Box
from petatron.sharding.flat_buffer import FlatParamGroup
from tests.dist import RankPool
from tests.longform import later
from tests.unit.posttrain.rollouts import Learned, learn, load, open_here, write_prompts
from tests.unit.posttrain.test_rollout_loader import check_equal

FSDP = "--dp 2 --data-parallel-sharding-strategy optim_grads_params"
ZERO = "--dp 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 --moe-aux-loss-coeff 0 "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[Learned]:
    return learn(load(f"--rollout-prompts {prompts}"))


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("--tp 2 --rollout-tp 1", 2),
        ("--tp 2 --sequence-parallel --rollout-tp 1 --rollout-pp 2", 2),
        ("--pp 2 --rollout-pp 1", 2),
        ("--pp 2 --rollout-pp 1 --rollout-tp 2 --rollout-keep-engine", 2),
        (f"{FSDP} --rollout-tp 1", 2),
        (f"{FSDP} --rollout-pp 2", 2),
        (f"{ZERO} --rollout-tp 2", 2),
        ("--cp 2", 2),
        later(f"{FSDP} --rollout-tp 2", 2),
        later(f"{ZERO} --rollout-pp 2", 2),
        later("--tp 2 --pp 2 --rollout-tp 4 --rollout-pp 1", 4),
        later("--tp 2 --pp 2 --rollout-tp 1 --rollout-pp 1", 4),
        later("--cp 2 --pp 2", 4),
        later("--cp 2 --tp 2 --rollout-tp 4", 4),
        later("--cp 2 --cp-comm-type a2a", 2),
    ],
)
def test_every_layout_of_drawing_gives_the_same_answers(
    ranks: RankPool, prompts: Path, alone: list[Learned], layout: str, world_size: int
):
    for learned in ranks.run(learn, world_size, load(f"--rollout-prompts {prompts} {layout}", world_size=world_size)):
        check_equal(learned, alone)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MOE, "--pp 2 --rollout-pp 1 --rollout-ep 2"),
        ("--adapter lora", "--tp 2 --rollout-tp 1 --rollout-keep-engine"),
        ("--num-layers 4 --micro-batch-size 1", "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
        later(MOE, "--ep 2 --dp 2 --rollout-ep 1"),
        later(MOE, "--cp 2"),
        later(MOE, "--cp 2 --ep 2"),
        later("--no-untie-embeddings-and-output-weights", "--pp 2 --rollout-pp 1"),
        later("--no-untie-embeddings-and-output-weights", "--tp 2 --rollout-tp 1 --rollout-pp 2"),
    ],
)
def test_other_models_draw_in_another_layout(ranks: RankPool, prompts: Path, model: str, layout: str):
    flags = f"--rollout-prompts {prompts} {model}"
    alone = learn(load(flags))
    for learned in ranks.run(learn, 2, load(f"{flags} {layout}", world_size=2)):
        check_equal(learned, alone)


def unequal_weights(run: RunConfig, round_bytes: int) -> tuple[list[str], int]:
    """On a rank: hands initial weights over, and returns the parameters that are not those that the other layout begins with."""
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    drawing = drawing_config(run)
    other = mesh.with_layout(Layout.from_config(drawing.parallel), label="rollout")
    model, wanted = build_initial_model(run, mesh), build_initial_model(drawing, other, gradients=False)
    target = build_initial_model(drawing, other, init_weights=False, gradients=False)
    handover = WeightHandover(model, target, mesh, round_bytes=round_bytes)
    handover.run()
    unequal = [
        name
        for number, stage in target.stages.items()
        for (name, ours), (_, theirs) in zip(stage.named_parameters(), wanted.stages[number].named_parameters())
        if not torch.equal(ours, theirs)
    ]
    return unequal, len(handover._plan.rounds)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (f"{MOE} --tp 2 --ep 2 --etp 1 --rollout-tp 1 --rollout-pp 2 --rollout-ep 1", 2),
        ("--num-query-groups 2 --dp 4 --data-parallel-sharding-strategy optim_grads_params --rollout-tp 4", 4),
        later("--num-query-groups 2 --make-vocab-size-divisible-by 8 --tp 4 --rollout-tp 1", 4),
    ],
)
def test_weights_arrive_in_many_rounds(ranks: RankPool, prompts: Path, flags: str, world_size: int):
    run = load(f"--rollout-prompts {prompts} {flags}", world_size=world_size).config
    for unequal, rounds in ranks.run(unequal_weights, world_size, run, 3000):
        assert not unequal and rounds > 10


def test_a_tensor_that_no_rank_has_is_an_error():
    needed, half = (HeldBox("a", (4,), Box((0,), (size,)), 0, torch.float32) for size in (4, 2))
    with pytest.raises(AssertionError, match="2 of 4 elements"):
        plan_handover([half], [needed], ParallelMesh.single().control)
    plan = plan_handover([needed], [half], ParallelMesh.single().control)
    assert plan.copies == [(0, 0, Box((0,), (2,)))] and not plan.rounds


def test_weights_come_from_the_nearest_rank_that_sends_least():
    box = Box((0,), (4,))
    tensor = _Tensor((4,), torch.float32, sources=[(rank, 0, box) for rank in (0, 1, 9)])
    tensor.targets = [(rank, 0, box) for rank in (1, 2, 3, 10, 20)]
    planned = list(_transfers(tensor, [_Piece(0, box)], {}, 8))
    assert [(source[0], target[0]) for _, source, target, _ in planned] == [(1, 1), (0, 2), (1, 3), (9, 10), (0, 20)]


def freed_bytes(run: LoadedConfig) -> tuple[list[int], list[int], set[str]]:
    """On a rank: the bytes of the copy after each of three rounds, and the random states that it leaves."""
    opened = open_here(run)
    before = torch.get_rng_state()
    model = opened.state.model
    copied = CopiedModel(run.config, model, iteration=lambda: 0)
    assert bool((torch.get_rng_state() == before).all()), "building a copy draws no random number of training's"
    groups = [group for group in copied._groups if isinstance(group, FlatParamGroup)]
    sizes = [sum(group.flat_weights.untyped_storage().nbytes() for group in groups)]
    copied.load()
    loaded = [sum(group.flat_weights.untyped_storage().nbytes() for group in groups)]
    seconds = copied.handover_s
    copied.load()
    assert copied.handover_s == seconds > 0, "weights that are there are not handed over again"
    copied.free()
    sizes.append(sum(group.flat_weights.untyped_storage().nbytes() for group in groups))
    opened.loaders.train.next_step(16, 0)
    names = set(opened.loaders.train.step_metrics)
    opened.loaders.train.close()
    return sizes, loaded, names


def test_the_memory_of_a_copy_is_given_back(ranks: RankPool, prompts: Path):
    run = load(f"--rollout-prompts {prompts} --pp 2 --rollout-pp 1", world_size=2)
    for sizes, loaded, names in ranks.run(freed_bytes, 2, run):
        assert sizes == [0, 0] and loaded[0] > 8 * 257 * 32
        assert names == {"draw s", "reward s", "hand-over s"}


def test_seconds_of_drawing_are_among_the_metrics(prompts: Path, tmp_path: Path):
    run_posttraining(load(f"--rollout-prompts {prompts} --train-iters 2 --log-interval 1 --log-dir {tmp_path}"))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "objective_metrics" in record]
    assert len(records) == 2 and all(record["objective_metrics"]["draw s"] > 0 for record in records)


REFUSED = {
    "--rollout-tp 3": "--rollout-tensor-model-parallel-size 3 makes tp 3 x pp 1 = 3, which does not divide the 4 ranks",
    "--rollout-tp 4 --num-attention-heads 2": "--rollout-tensor-model-parallel-size 4 does not divide --num-attention-heads 2 (while",
    "--rollout-pp 4": "--rollout-pipeline-model-parallel-size 4 does not divide",
    "--rollout-ep 2": "--rollout-expert-model-parallel-size 2 needs --num-experts (while answers are drawn)",
    "--rollout-tp 2 --exact-rollouts --no-fp64": "adds partial sums in another order than training with --tensor-model-parallel-size 1",
    "--rollout-tp 2 --fp8-format hybrid --fp8-recipe delayed --no-fp64 --bf16": "--fp8-recipe delayed scales by what was seen in",
    "--rollout-tp 2 --adapter lora --adapter-base-format nf4": "--adapter-base-format nf4 holds frozen weights in blocks of the layout",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_layouts_that_cannot_draw_are_refused(prompts: Path, flags: str):
    with pytest.raises(ConfigError) as refused:
        load(f"--rollout-prompts {prompts} --dp 4 {flags}", world_size=4)
    assert REFUSED[flags] in str(refused.value)


def test_a_layout_of_drawing_keeps_what_it_can(prompts: Path):
    run = load(f"--rollout-prompts {prompts} --tp 2 --cp 2 --sequence-parallel --rollout-tp 1", world_size=4).config
    parallel = drawing_config(run).parallel
    assert (parallel.data_parallel_size, parallel.context_parallel_size, parallel.sequence_parallel) == (4, 1, False)
    assert replace(run, parallel=parallel).parallel.world_size == 4
