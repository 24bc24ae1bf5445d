"""A run that is stopped and resumed is the run that was not: bitwise in the same layout, and on the same global batches in
any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.device import detect_device
from petatron.base.errors import CheckpointError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_loaders
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from tests.checkpoint_chunks import checkpoint_chunks
from tests.dist import RankFailure, RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run
from tests.unit.checkpoint.rewriting import rewrite_manifest

ITERATIONS, STOP = 4, 2
MODEL = (
    f"--train-iters {ITERATIONS} --hidden-dropout 0.1 --attention-dropout 0.1 --lr-decay-iters {ITERATIONS} "
    "--global-batch-size 4"
)
GOLDEN = Path(__file__).parents[2] / "golden/checkpoint-v4/step-00000003"
DELAYED = "--fp8-hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


class Losses:
    """A writer that keeps every step's loss."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def write(self, record) -> None:
        if record["kind"] == "train":
            self.values[record["iteration"]] = record["lm_loss"]

    def close(self) -> None: ...


def run_loop(run: RunConfig) -> tuple[dict[int, float], dict[tuple, torch.Tensor]]:
    """On one rank: from the newest checkpoint to the run's end; losses, and every tensor of the final state."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(Layout.from_config(run.parallel), rank)
    state = TrainState.build_for_load(run, mesh)
    if run.checkpoint.load is not None:
        state.load(run.checkpoint.load)
    losses = Losses()
    TrainLoop(state, build_loaders(run, mesh), [losses], detect_device("cpu")).run()
    tensors = {
        (chunk.key, chunk.start): chunk.tensor.clone() for chunk in checkpoint_chunks(state.model, state.optimizer)
    }
    return losses.values, tensors


def trained(ranks: RankPool, flags: str, world_size: int, dtype: str = "float32"):
    run = tiny_run(f"{MODEL} --log-interval 1 {flags}", world_size=world_size, dtype=dtype)
    return ranks.run(run_loop, world_size, run)


@diagonal(3)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("", 1),
        later("--tp 2 --dp 2 --sequence-parallel", 4),
        later("--tp 2 --bf16", 2),
        ("--fp16 --initial-loss-scale 65536 --loss-scale-window 3", 1),
        ("--pp 2 --dp 2 --use-distributed-optimizer --overlap-param-gather --bf16 --micro-batch-size 1", 4),
        (
            "--pp 2 --pipeline-schedule zb-h1 --cp 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            4,
        ),
        (
            "--dp 2 --ep 2 --data-parallel-sharding-strategy optim_grads_params --num-experts 4 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            2,
        ),
        later(f"--bf16 {DELAYED}", 1),
        (f"--bf16 {DELAYED} --tp 2 --sequence-parallel --async-save --micro-batch-size 4", 2),
        later(f"--bf16 {DELAYED} --pp 2 --eval-interval 2 --eval-iters 1", 2),
    ],
)
def test_bitwise_after_a_stop_at_any_step(ranks: RankPool, tmp_path: Path, layout: str, world_size: int):
    whole = trained(ranks, layout, world_size)
    for stop in (STOP,) if layout else range(1, ITERATIONS):
        folder = tmp_path / str(stop)
        save = f"{layout} --save {folder}"
        before = trained(ranks, f"{save} --exit-interval {stop}", world_size)
        after = trained(ranks, f"{save} --load {folder}", world_size)
        for rank in range(world_size):
            assert max(before[rank][0]) == stop and min(after[rank][0]) == stop + 1
            assert {**before[rank][0], **after[rank][0]} == whole[rank][0]
            for key, tensor in whole[rank][1].items():
                assert torch.equal(after[rank][1][key], tensor), key


@cache
def _losses_of_one_process(flags: str) -> dict[int, float]:
    return run_loop(tiny_run(f"{MODEL} --log-interval 1 {flags}", dtype="float64"))[0]


QUIET = "--hidden-dropout 0 --attention-dropout 0"


@pytest.fixture(scope="module")
def saved_by_two_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    trained(ranks, f"{QUIET} --save {folder} --exit-interval {STOP} --tp 2", 2, "float64")
    return folder


@diagonal(2)
@pytest.mark.parametrize("layout", ["--micro-batch-size 4", "--dp 2", "--tp 2 --dp 2 --micro-batch-size 1", "--tp 4"])
def test_another_layout_continues_on_the_same_batches(ranks: RankPool, saved_by_two_ranks: Path, layout: str):
    whole = _losses_of_one_process(QUIET)
    world_size = 4 if "--tp" in layout else 2 if "--dp" in layout else 1
    after, _ = trained(ranks, f"{QUIET} {layout} --load {saved_by_two_ranks}", world_size, "float64")[0]
    assert sorted(after) == list(range(STOP + 1, ITERATIONS + 1))
    for iteration, loss in after.items():
        assert loss == pytest.approx(whole[iteration], rel=1e-9)


ANY = {
    "tp2": ("--tp 2", 2),
    "pp2-interleaved-zero1": ("--pp 2 --num-virtual-stages-per-pipeline-rank 2 --dp 2 --use-distributed-optimizer", 4),
    "zero3": ("--dp 4 --micro-batch-size 1 --data-parallel-sharding-strategy optim_grads_params", 4),
    "cp2-zb-v-zero1": ("--cp 2 --pp 2 --pipeline-schedule zb-v --use-distributed-optimizer", 4),
    "hybrid": ("--dp 4 --micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 2", 4),
}


CHAIN = ("pp2-interleaved-zero1", "zero3", "cp2-zb-v-zero1", "hybrid", "tp2", "pp2-interleaved-zero1")
"""Every layout loads what the one before it saved."""


@pytest.mark.parametrize("tied", [later(""), later("--no-untie-embeddings-and-output-weights")])
def test_state_moves_from_one_way_of_sharding_to_the_next(ranks: RankPool, tmp_path: Path, tied: str):
    """One step in each: wrong weights show in its loss, wrong moments in the next one's."""
    end = len(CHAIN) + 2
    quiet = f"{QUIET} --global-batch-size 8 --num-layers 4 --train-iters {end} --lr-decay-iters {end} {tied}"
    whole, losses = _losses_of_one_process(quiet), {}
    for stop, name in enumerate(CHAIN, start=2):
        flags, world_size = ANY[name]
        load = f"--load {tmp_path}" if losses else ""
        last = f"--exit-interval {stop}" if stop < end - 1 else ""
        found, _ = trained(ranks, f"{quiet} {flags} --save {tmp_path} {load} {last}", world_size, "float64")[0]
        assert sorted(found) == [*range(len(losses) + 1, stop + 1 if last else end + 1)]
        assert found == pytest.approx({step: whole[step] for step in found}, rel=1e-9), name
        losses |= found
    assert sorted(losses) == sorted(whole)


@diagonal(2)
@pytest.mark.parametrize(("saved_in", "loaded_in"), [("--bf16", ""), ("", "--bf16"), ("--bf16", "--fp16")])
def test_another_precision_continues_from_the_master_weights(
    ranks: RankPool, tmp_path: Path, saved_in: str, loaded_in: str
):
    [(_, saved)] = trained(ranks, f"{QUIET} {saved_in} --save {tmp_path} --exit-interval {STOP}", 1)
    run = tiny_run(f"{MODEL} {QUIET} {loaded_in} --load {tmp_path}")
    state = TrainState.build(run, ParallelMesh.single())
    assert state.load(str(tmp_path)) and state.progress.iteration == STOP
    for chunk in checkpoint_chunks(state.model, state.optimizer):
        kind, name = chunk.key.split("/")
        if kind == "model" and state.optimizer.has_master_weights:
            continue
        wide = saved.get((f"master/{name}", chunk.start), saved.get((f"model/{name}", chunk.start)))
        wanted = wide if kind in ("model", "master") else saved[chunk.key, chunk.start]
        assert wanted is not None and chunk.tensor.dtype == wanted.dtype == torch.float32
        assert torch.equal(chunk.tensor, wanted), chunk.key
    own = {
        piece.name: view
        for group in state.model.param_groups
        for piece, view in group_tensor_shards(group, group.weights())
    }
    for _, piece, master in state.optimizer.master_weights():
        assert torch.equal(own[piece.name], master.to(own[piece.name].dtype)), piece.name


def test_other_experts_are_another_model(ranks: RankPool, tmp_path: Path):
    model = "--num-experts 4 --moe-aux-loss-coeff 0.01"
    trained(ranks, f"{model} --save {tmp_path} --exit-interval 2", 1)
    other_training = "--moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall --train-iters 3"
    trained(ranks, f"{model} --load {tmp_path} {other_training}", 1)
    with pytest.raises(RankFailure, match="moe_router_topk: 2 then, 3 now"):
        trained(ranks, f"{model} --load {tmp_path} --moe-router-topk 3", 1)


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "refused"),
    [
        (
            "--optimizer sgd",
            "--optimizer sgd --sgd-momentum 0",
            r"momentum_buffer/.* is in the checkpoint, but not in this run",
        ),
        (
            "--optimizer sgd --sgd-momentum 0",
            "--optimizer sgd",
            r"momentum_buffer/.* is not in the checkpoint[^$]*Use the model",
        ),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
            "--num-experts 4 --moe-router-score-function sigmoid --finetune",
            r"router/.*expert_bias is in the checkpoint, but not in this run",
        ),
    ],
)
def test_nothing_is_left_behind_silently(tmp_path: Path, saved_with: str, loaded_with: str, refused: str):
    run_loop(tiny_run(f"{MODEL} {saved_with} --save {tmp_path} --exit-interval 1"))
    with pytest.raises(CheckpointError, match=refused):
        run_loop(tiny_run(f"{MODEL} {loaded_with} --load {tmp_path}"))


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "said"),
    [("--no-save-rng", "", "the checkpoint has none"), ("", "--no-load-rng", "--no-load-rng"), ("", "", None)],
)
def test_random_states_that_start_anew_are_announced(
    tmp_path: Path, saved_with: str, loaded_with: str, said: str | None
):
    run_loop(tiny_run(f"{MODEL} {saved_with} --save {tmp_path} --exit-interval 1"))
    state = TrainState.build(tiny_run(f"{MODEL} {loaded_with} --load {tmp_path}"), ParallelMesh.single())
    state.load(str(tmp_path))
    words = [change for change in state.resume_changes if "random states" in change]
    assert words == ([] if said is None else [f"random states (dropout) start anew: {said}"])


def test_the_key_of_a_layout_stays_that_of_earlier_checkpoints():
    """A key that differs leaves the random states of every checkpoint of an earlier version."""
    earlier = (
        "Layout(pp=1, dp_outer=1, dp_shard=1, cp=1, tp=1, ep=1, etp=1) sequence_parallel=False "
        "PipelinePlan(name='1f1b', ranks=1, virtual=1, group_size=None, combined=False)"
    )
    state = TrainState.build(tiny_run(MODEL), ParallelMesh.single())
    assert state.model.layout_key == earlier
    assert json.loads((GOLDEN / "manifest.json").read_text())["layout"] == earlier.replace(
        "dp_shard=1, cp=1, tp=1, ep=1, etp=1", "dp_shard=2, cp=1, tp=2, ep=1, etp=2"
    )


def test_random_states_of_another_layout_are_said_to_be(tmp_path: Path):
    run_loop(tiny_run(f"{MODEL} --save {tmp_path} --exit-interval 1"))
    manifest = tmp_path / "step-00000001" / "manifest.json"
    rewrite_manifest(manifest.parent, lambda head: head.update(layout="another"))
    state = TrainState.build(tiny_run(f"{MODEL} --load {tmp_path}"), ParallelMesh.single())
    state.load(str(tmp_path))
    words = [change for change in state.resume_changes if "random states" in change]
    assert words == ["random states (dropout) start anew: the checkpoint has none for this layout"]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which a run with these flags was saved; each is trained once."""

    @cache
    def saved(flags: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_loop(tiny_run(f"{flags} --save {folder}"))
        return folder

    return saved


_ANEW = "FP8 histories start anew, and the next step scales by its own tensors: "
_NONE = "the checkpoint has none"
_OTHERS = "those in the checkpoint are of other products, another format or another --fp8-amax-history-len"
_LAYOUT = "the checkpoint has none for this layout, where a rank sees other parts of the tensors"


@diagonal(3)
@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "said"),
    [
        (DELAYED, DELAYED, None),
        (DELAYED, f"{DELAYED} --no-load-rng --fp8-amax-compute-algo most_recent", None),
        (f"{DELAYED} --no-save-rng", DELAYED, None),
        (DELAYED, "--fp8-hybrid --fp8-recipe rowwise", None),
        (DELAYED, "", None),
        (DELAYED, f"{DELAYED} --finetune", None),
        ("", DELAYED, _NONE),
        ("--no-save-rng", DELAYED, _NONE),
        (DELAYED, f"{DELAYED} --fp8-amax-history-len 4", _OTHERS),
        (DELAYED, DELAYED.replace("--fp8-hybrid", "--fp8-format e4m3"), _OTHERS),
        (DELAYED, f"{DELAYED} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0", _OTHERS),
        (DELAYED, f"{DELAYED} --no-load-optim", "--no-load-optim"),
    ],
)
def test_fp8_histories_that_start_anew_are_announced(
    saved_once: Callable[[str], Path], saved_with: str, loaded_with: str, said: str | None
):
    base = f"{MODEL} --bf16"
    folder = saved_once(f"{base} {saved_with} --exit-interval 2")
    state = TrainState.build(tiny_run(f"{base} {loaded_with} --load {folder}"), ParallelMesh.single())
    before = list(state.model.fp8_gemms.state().values())
    state.load(str(folder))
    words = [change for change in state.resume_changes if "FP8 histories" in change]
    assert words == ([] if said is None else [f"{_ANEW}{said}"])
    if "delayed" in loaded_with:
        [now] = state.model.fp8_gemms.state().values()
        assert torch.equal(now, before[0]) == (said is not None or "--finetune" in loaded_with)


def test_fp8_histories_stay_behind_in_another_layout(ranks: RankPool, tmp_path: Path):
    quiet = f"--bf16 {QUIET} {DELAYED}"
    whole, _ = trained(ranks, quiet, 1)[0]
    trained(ranks, f"{quiet} --tp 2 --save {tmp_path} --exit-interval {STOP}", 2)
    state = TrainState.build(tiny_run(f"{MODEL} {quiet} --load {tmp_path}"), ParallelMesh.single())
    assert state.load(str(tmp_path)) and f"{_ANEW}{_LAYOUT}" in state.resume_changes
    after, _ = trained(ranks, f"{quiet} --load {tmp_path}", 1)[0]
    for iteration, loss in after.items():
        assert loss == pytest.approx(whole[iteration], rel=2e-2)


def test_an_evaluation_leaves_no_trace_in_fp8_histories():
    flags = f"{MODEL} --bf16 {DELAYED} --log-interval 1"
    plain, often = (run_loop(tiny_run(f"{flags} {more}"))[0] for more in ("", "--eval-interval 2 --eval-iters 2"))
    assert plain == often


def test_weights_of_another_model_name_the_settings(tmp_path: Path):
    run_loop(tiny_run(f"{MODEL} --save {tmp_path} --exit-interval 1"))
    with pytest.raises(CheckpointError, match=r"(?s)does not fit this run.*that differ: num_layers: 2 then, 3 now"):
        run_loop(tiny_run(f"{MODEL} --load {tmp_path} --finetune --num-layers 3"))
    state = TrainState.build(
        tiny_run(f"{MODEL} --load {tmp_path} --finetune --rotary-base 5000"), ParallelMesh.single()
    )
    assert state.load(str(tmp_path))
    assert state.resume_changes == ["rotary_base: 10000.0 then, 5000.0 now: the weights are used in another model"]
