"""The moving average of the weights is torch's, in every layout; it is evaluated, saved, resharded and exported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import petatron
from petatron.base.device import detect_device
from petatron.base.errors import ConfigError
from petatron.checkpoint.files import step_folder
from petatron.cli.main import main
from petatron.config import RunConfig
from petatron.estimate.state_bytes import state_bytes
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loader, build_loaders
from petatron.train.evaluate_loss import EvaluatedLosses, evaluate
from petatron.train.state.optional_components import check_components
from petatron.train.state.train_state import TrainState
from petatron.train.state.weight_average import WeightAverage
from petatron.train.train_step import train_step
from petatron.train.training_loop import TrainLoop
from petatron.verify.record_trace import TracedShard, assemble_tensors
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run

DECAY, STEPS = 0.7, 4
EMA = f"--ema-decay {DECAY} --train-iters {STEPS} --lr-decay-iters {STEPS} --eval-iters 1"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --global-batch-size 4"
FROZEN = "--freeze head.* *norm* layers.1.*"
Shards = list[TracedShard]


def run_of(flags: str, world_size: int = 1, dtype: str = "float64") -> RunConfig:
    return tiny_run(f"{EMA} {flags}", world_size=world_size, dtype=dtype)


def build(run: RunConfig) -> tuple[TrainState, WeightAverage]:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state = TrainState.build_for_load(run, mesh)
    if run.checkpoint.load is not None:
        state.load(run.checkpoint.load)
    [average] = state.added_components
    assert isinstance(average, WeightAverage)
    return state, average


def weights(state: TrainState) -> Shards:
    return [
        TracedShard("weight", piece.name, piece.logical_shape, piece.start, view.detach().clone())
        for _, piece, view in state.optimizer.master_weights()
    ]


def averages(average: WeightAverage) -> Shards:
    return [
        TracedShard("weight", chunk.key.partition("/")[2], chunk.logical_shape, chunk.start, chunk.tensor.clone())
        for chunk in average.chunks()
    ]


@dataclass
class Outcome:
    averages: Shards
    weights: Shards
    loss: float
    averaged_loss: float
    changes: list[str]


def train(run: RunConfig, end: int = STEPS) -> Outcome:
    """On one rank: to a step, with an evaluation that must change nothing; saves if it has a folder."""
    state, average = build(run)
    for batches in build_loader(run, state.mesh, state=state):
        if state.progress.iteration == end:
            break
        train_step(state, batches)
    before = weights(state), averages(average), [w.clone() for g in state.model.param_groups for w in g.weights()]
    [loader] = build_loaders(run, state.mesh).valid.values()
    result = evaluate(state, loader)
    assert isinstance(result, EvaluatedLosses)
    after = [w for g in state.model.param_groups for w in g.weights()]
    assert all(map(torch.equal, before[2], after)), "the evaluation changed the model's weights"
    for old, new in zip((*before[0], *before[1]), (*weights(state), *averages(average)), strict=True):
        assert torch.equal(old.values, new.values), old.name
    if state.checkpoint_manager is not None:
        state.save()
    return Outcome(before[1], before[0], result.loss, result.loss_by_weights["averaged weights"], state.resume_changes)


class Plain(nn.Module):
    """The logical weights as parameters of torch's own."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors.values())

    def take(self, tensors: dict[str, Tensor]) -> None:
        for parameter, tensor in zip(self.tensors, tensors.values(), strict=True):
            parameter.data.copy_(tensor)


def by_name(shards: Shards) -> dict[str, Tensor]:
    return {name: tensor for (_, name), tensor in sorted(assemble_tensors(shards).items())}


@cache
def torch_average(model: str, start: int = 0, interval: int = 1) -> tuple[dict[str, Tensor], float]:
    """What torch's AveragedModel has after the run of one process; and the loss of a model with these weights."""
    state, _ = build(run_of(model))
    run = state.run
    plain = Plain(by_name(weights(state)))
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for update, batches in enumerate(build_loader(run, state.mesh, state=state), start=1):
        train_step(state, batches)
        plain.take(by_name(weights(state)))
        if update > start and (update - start) % interval == 0:
            averaged.update_parameters(plain)
    tensors = dict(zip(by_name(weights(state)), (x.detach() for x in averaged.module.tensors)))
    for _, piece, view in state.optimizer.master_weights():
        view.copy_(tensors[piece.name][piece.logical_slices()])
    state.model.all_gather_params()
    state.added_components.clear()
    [loader] = build_loaders(run, state.mesh).valid.values()
    result = evaluate(state, loader)
    assert isinstance(result, EvaluatedLosses)
    return tensors, result.loss


def check(found: list[Outcome], model: str, start: int = 0, interval: int = 1) -> None:
    expected, loss = torch_average(model, start, interval)
    tensors = by_name([shard for outcome in found for shard in outcome.averages])
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-9, atol=1e-12)
    assert found[0].averaged_loss == pytest.approx(loss, rel=1e-9) and found[0].loss != found[0].averaged_loss


@diagonal(3)
@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    [
        ("", "", 1),
        later("--dp 2", "", 2),
        ("--dp 2 --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce", "", 2),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", "", 2),
        later("--tp 2 --sequence-parallel", "", 2),
        ("--pp 2", "", 2),
        later("--dp 2 --ep 2 --micro-batch-size 2", f"{EXPERTS} --micro-batch-size 2", 2),
        later("--optimizer muon --dp 2 --use-distributed-optimizer", "--optimizer muon", 2),
        ("--dp 2 --use-distributed-optimizer", FROZEN, 2),
        later("--dp 2 --data-parallel-sharding-strategy optim_grads_params", FROZEN, 2),
        later("--pp 2", FROZEN, 2),
    ],
)
def test_every_layout_averages_as_torch_does(ranks: RankPool, layout: str, model: str, world_size: int):
    run = run_of(f"{model} {layout}", world_size)
    check(ranks.run(train, world_size, run) if world_size > 1 else [train(run)], model)


def test_it_begins_late_and_takes_some_updates():
    check([train(run_of("--ema-start 1 --ema-interval 2 --train-iters 5"), 5)], "--train-iters 5", 1, 2)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved at half of the run by two ranks that shard the state."""
    folder = tmp_path_factory.mktemp("average") / "run"
    ranks.run(train, 2, run_of(f"--dp 2 --use-distributed-optimizer --save {folder}", 2), STEPS // 2)
    return folder


def test_it_continues_in_the_same_layout_bitwise_and_in_any_other(ranks: RankPool, saved: Path):
    layout = "--dp 2 --use-distributed-optimizer"
    resumed = ranks.run(train, 2, run_of(f"{layout} --load {saved}", 2))
    for mine, theirs in zip(resumed, ranks.run(train, 2, run_of(layout, 2)), strict=True):
        for one, other in zip(mine.averages, theirs.averages, strict=True):
            assert torch.equal(one.values, other.values), one.name
        assert mine.averaged_loss == theirs.averaged_loss
    check(ranks.run(train, 2, run_of(f"--tp 2 --load {saved}", 2)), "")


def test_a_checkpoint_without_it_is_said_and_so_is_one_that_has_it(saved: Path, tmp_path: Path):
    plain = replace(run_of(f"--load {saved} --save {tmp_path}"), train=replace(run_of("").train, ema_decay=None))
    state = TrainState.build(plain, ParallelMesh.single())
    assert state.load(str(saved)) and not state.added_components
    extra = "averaged weights of the checkpoint are not used by this run, and its checkpoints will not have them"
    assert extra in state.resume_changes
    state.save()
    state, average = build(run_of(f"--load {tmp_path}"))
    assert "averaged weights start from the weights now: the checkpoint has none" in state.resume_changes
    assert not average.is_ready
    for one, other in zip(averages(average), weights(state), strict=True):
        assert torch.equal(one.values, other.values)


def test_half_precision_keeps_the_average_in_full_precision(tmp_path: Path):
    found = train(run_of(f"--bf16 --save {tmp_path}", dtype="float32"))
    assert {shard.values.dtype for shard in found.averages} == {torch.float32}
    state, average = build(run_of(f"--bf16 --load {tmp_path}", dtype="float32"))
    for one, other in zip(averages(average), found.averages, strict=True):
        assert torch.equal(one.values, other.values)
    with average.in_model():
        own = next(weight for group in state.model.param_groups for weight in group.weights())
        master = state.optimizer.segments[0].master
        assert torch.equal(own, average._averages[0].to(own.dtype)) and not torch.equal(own, master.to(own.dtype))
    assert torch.equal(own, master.to(own.dtype))


def test_training_is_the_same_to_the_bit_with_an_average_that_is_evaluated():
    """The average passes through the model, with FP8's caches and histories of largest magnitudes."""
    flags = "--bf16 --fp8-hybrid --fp8-recipe delayed --eval-interval 2 --log-interval 1"
    records: list[list[float]] = []
    for more in ("", "--ema-decay none"):
        run = run_of(f"{flags} {more}", dtype="float32")
        losses: list[float] = []

        class Writer:
            def write(self, record, losses=losses) -> None:
                losses.extend(record[name] for name in ("lm_loss", "grad_norm") if name in record)

            def close(self) -> None: ...

        state = TrainState.build(run, ParallelMesh.single())
        TrainLoop(state, build_loaders(run, state.mesh), [Writer()], detect_device("cpu")).run()
        records.append(losses)
    assert records[0] == records[1] and len(records[0]) > 2 * STEPS


def test_an_update_that_the_device_skipped_does_not_count():
    state, average = build(run_of(""))
    run = state.run
    batches = next(build_loader(run, state.mesh, state=state))
    train_step(state, batches)
    before = averages(average)
    with torch.no_grad():
        for segment in state.optimizer.segments:
            segment.master.add_(1.0)
    average.after_update(updates=2, skipped=torch.ones(()))
    assert all(torch.equal(one.values, other.values) for one, other in zip(before, averages(average), strict=True))
    average.after_update(updates=3, skipped=torch.zeros(()))
    assert not torch.equal(before[0].values, averages(average)[0].values)


def test_the_log_has_both_losses_and_inspect_and_convert_the_weights(tmp_path: Path, capsys):
    run = run_of(f"--save {tmp_path}/run --eval-interval 2 --save-interval 1")
    state, average = build(run)
    records: list[dict] = []

    class Writer:
        def write(self, record) -> None:
            records.append(dict(record))

        def close(self) -> None: ...

    TrainLoop(state, build_loaders(run, state.mesh), [Writer()], detect_device("cpu")).run()
    losses = [record for record in records if record["kind"] == "valid" and record["split"] == "valid"]
    assert [record["iteration"] for record in losses] == [2, 4]
    assert all(record["loss_by_weights"]["averaged weights"] != record["lm_loss"] for record in losses)
    assert main(["checkpoint", "inspect", f"{tmp_path}/run"]) == 0
    assert "ema/" in capsys.readouterr().out
    to = ["--to", "huggingface"]
    assert main(["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/ema", *to, "--weights", "ema"]) == 0
    _check_model(tmp_path / "ema", by_name(averages(average)))
    assert main(["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/mean", *to, "--average-last", "3"]) == 0
    plain = Plain(by_name(weights(state)))
    averaged = AveragedModel(plain)
    for step in sorted(step_folder.list_steps(tmp_path / "run"))[-3:]:
        model = petatron.from_pretrained(tmp_path / "run" / step_folder.step_name(step), dtype="fp64")
        plain.take(_logical(model))
        averaged.update_parameters(plain)
    _check_model(tmp_path / "mean", dict(zip(by_name(weights(state)), averaged.module.tensors)))
    assert main(["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/no", *to, "--weights", "eam"]) == 1
    assert "has no weights eam/. Its kinds of state are ema, exp_avg, exp_avg_sq, model" in capsys.readouterr().err
    assert main(["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/no", *to, "--average-last", "9"]) == 1
    assert "has not 9 steps to average; it has: 1, 2, 3, 4" in capsys.readouterr().err


def test_a_frozen_weight_is_its_own_average(tmp_path: Path):
    """Neither kept nor saved, and counted so; a converted model has the weight."""
    run = run_of(f"{FROZEN} --save {tmp_path}/run")
    outcome = train(run)
    averages = by_name(outcome.averages)
    assert averages.keys() == by_name(outcome.weights).keys() and not any("norm" in name for name in averages)
    elements = sum(tensor.numel() for tensor in averages.values())
    assert state_bytes(run).copies == pytest.approx(8 * elements, rel=0.02), "but for the padding of the vocabulary"
    convert = ["checkpoint", "convert", f"{tmp_path}/run", f"{tmp_path}/ema", "--to", "huggingface"]
    assert main([*convert, "--weights", "ema"]) == 0
    whole = _logical(petatron.from_pretrained(tmp_path / "run", dtype="fp64"))
    _check_model(tmp_path / "ema", whole | averages)


def _logical(model: petatron.Model) -> dict[str, Tensor]:
    shards = [
        TracedShard("weight", piece.name, piece.logical_shape, piece.start, view.detach())
        for group in model.param_groups
        for shard, weight in zip(group.flat_shards, group.weights(), strict=True)
        for piece, view in shard.tensor_shards(weight)
    ]
    return by_name(shards)


def _check_model(folder: Path, expected: dict[str, Tensor]) -> None:
    found = _logical(petatron.from_pretrained(folder, dtype="fp64"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--optimizer-cpu-offload", "averages master weights on the device, and --optimizer-cpu-offload keeps them"),
        ("--ema-decay 1", "is out of range"),
        ("--ema-interval 0", "is below 1"),
    ],
)
def test_what_it_cannot_go_with_is_refused(flags: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        check_components(run_of(flags))


@pytest.mark.parametrize(("precision", "size"), [("--bf16", 4), ("", 4), ("--fp64", 8)])
def test_memory_is_counted(precision: str, size: int):
    run = tiny_run(f"{precision} --dp 2 --use-distributed-optimizer", world_size=2)
    with_average = replace(run, train=replace(run.train, ema_decay=0.9))
    state, plain = state_bytes(with_average), state_bytes(run)
    owned = plain.moments // (2 * size)
    assert state.copies == size * owned == state.total - plain.total and plain.copies == 0
