"""Objectives of preferences train the same in every layout, in float64, on pairs that are packed into rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import petatron
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.models.objective import parse_objective
from petatron.train.build_run import build_loader
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from petatron.verify.compare_traces import Tolerances
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_traces, tiny_run, train

BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)
_TEXT = "--vocab-size 257 --tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 1 --seq-length 48"
OBJECTIVES = {
    "dpo": "--objective dpo --objective-settings beta=0.5 chosen_weight=0.2",
    "orpo": "--objective orpo",
    "simpo": "--objective simpo",
    "kto": "--objective kto --objective-settings beta=0.5",
    "reward": "--objective reward --pooling last --num-labels 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to start from, pairs, and answers that are desirable or not."""
    folder, random = tmp_path_factory.mktemp("preferences"), np.random.default_rng(3)
    start = tiny_run(f"{_TEXT} --seed 7", dtype="float64")
    petatron.save_checkpoint(folder / "start", step=1, model=petatron.build_model(start, ParallelMesh.single()))

    def text(low: int, high: int) -> str:
        return "".join(chr(97 + number) for number in random.integers(0, 26, random.integers(low, high)))

    pairs = [{"prompt": text(2, 8), "chosen": text(2, 12), "rejected": text(2, 12)} for _ in range(64)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    single = [
        {"prompt": x["prompt"], "completion": x["chosen"], "label": place % 3 != 0} for place, x in enumerate(pairs)
    ]
    (folder / "single.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in single))
    return folder


def run_of(folder: Path, objective: str, layout: str = "", *, world_size: int = 1) -> RunConfig:
    data = folder / ("single.jsonl" if objective == "kto" else "pairs.jsonl")
    # What kto compares with is a mean over the samples of all ranks in a micro-batch, so layouts have as many.
    micro = 4 // (2 if "--dp 2" in layout else 1)
    flags = (
        f"{_TEXT} --no-mock-data --data-path {data} --split 1 --pretrained-checkpoint {folder}/start {OBJECTIVES[objective]} "
        f"--micro-batch-size {micro} --global-batch-size 8 {layout}"
    )
    return tiny_run(flags, world_size=world_size, dtype="float64")


LAYOUTS = {
    "--tp 2 --sequence-parallel": 2,
    "--pp 2": 2,
    "--cp 2": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
    "--dp 2 --use-distributed-optimizer": 2,
}
AT_ONCE = {("dpo", "--cp 2"), ("kto", "--dp 2 --use-distributed-optimizer"), ("orpo", "--pp 2")}
CASES = [
    (name, layout) if (name, layout) in AT_ONCE else later(name, layout) for name in OBJECTIVES for layout in LAYOUTS
]


@diagonal(1)
@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_every_layout_prefers_the_same(ranks: RankPool, folder: Path, objective: str, layout: str):
    alone = train(run_of(folder, objective))
    check_traces(ranks, run_of(folder, objective, layout, world_size=LAYOUTS[layout]), alone, BOUNDS)


def test_the_reference_is_where_the_run_started(folder: Path, tmp_path: Path):
    """So the first loss is log 2, and no longer once the run is resumed with other weights."""
    flags = f"--objective-settings chosen_weight=0 --train-iters 9 --save {tmp_path}/run --load {tmp_path}/run"
    losses = []
    for _ in range(2):
        run = run_of(folder, "dpo", flags)
        state = TrainState.build_for_load(run, ParallelMesh.single())
        if run.checkpoint.load is not None and not state.load(run.checkpoint.load):
            state.load_pretrained_weights(f"{folder}/start")
        loader = build_loader(run, state.mesh, state=state)
        losses += [float(train_step(state, next(loader)).loss) for _ in range(2)]
        state.save()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-12) and abs(losses[2] - losses[0]) > 1e-6
    lost = tiny_run(f"{_TEXT} --no-mock-data --data-path {folder}/pairs.jsonl {OBJECTIVES['dpo']}", dtype="float64")
    with pytest.raises(ConfigError, match=r"reference=start is the model that the run starts from.*Add --from FOLDER"):
        TrainState.build_for_load(lost, ParallelMesh.single())


REFUSED = {
    ("dpo", "beta=0"): "beta=0.0 is not above 0",
    ("dpo", "label_smoothing=0.5"): "is not from 0 to below 0.5",
    ("dpo", "loss_type=ipo label_smoothing=0.1"): "has no effect with loss_type=ipo",
    ("orpo", "beta=-1"): "is not above 0",
    ("simpo", "gamma=-1"): "is below 0",
    ("kto", "desirable_weight=-1"): "is below 0",
    ("policy-gradient", "clip_low=2"): "is not from 0 to 1",
    ("policy-gradient", "dual_clip=0.5"): "is not above 1",
    ("policy-gradient", "average=constant"): "is the divisor of average=constant",
    ("policy-gradient", "kl_weight=-1 max_importance_weight=-1"): "kl_weight=-1.0 is below 0",
}


@pytest.mark.parametrize(("name", "settings"), REFUSED)
def test_settings_that_mean_nothing(name: str, settings: str):
    with pytest.raises(ConfigError) as refused:
        parse_objective(name, settings.split())
    assert REFUSED[name, settings] in str(refused.value)


def test_a_score_needs_the_head_that_gives_it(folder: Path):
    run = tiny_run(f"{_TEXT} --no-mock-data --data-path {folder}/pairs.jsonl --objective reward", dtype="float64")
    with pytest.raises(ConfigError, match=r"needs label_logits of the model.*Add --pooling last --num-labels 1"):
        TrainState.build_for_load(run, ParallelMesh.single())
