"""Checkpoints of runs with frozen parameters: all weights, no optimizer state of what is frozen, and another set on resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import petatron
from petatron.checkpoint.files import step_list
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.state.train_state import TrainState
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run
from tests.parity.state.test_resume import run_loop

ITERATIONS, STOP = 3, 2
MODEL = f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --global-batch-size 4 --bf16 --log-interval 1"
FREEZE = "--freeze embedding.* layers.0.*"
ZERO1, ZERO3 = "--dp 2 --use-distributed-optimizer", "--dp 2 --data-parallel-sharding-strategy optim_grads_params"


def run_of(folder: Path, flags: str, *, world_size: int = 1, stop: bool = False) -> RunConfig:
    until = f"--exit-interval {STOP}" if stop else ""
    return tiny_run(f"{MODEL} {flags} {until} --save {folder} --load {folder}", world_size=world_size)


def train(ranks: RankPool, run: RunConfig):
    """Every rank's losses and final state."""
    return [run_loop(run)] if run.parallel.world_size == 1 else ranks.run(run_loop, run.parallel.world_size, run)


def saved_keys(folder: Path) -> dict[str, int]:
    """The elements of every tensor that a checkpoint has besides the model's folder."""
    found: dict[str, int] = {}
    for path in step_list.resolve_step(folder, None).rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                found[key] = file.get_tensor(key).numel()
    return found


@diagonal(2)
@pytest.mark.parametrize("layout", ["", later(ZERO1), ZERO3, "--pp 2"])
def test_resumed_run_is_the_uninterrupted_one(ranks: RankPool, tmp_path: Path, layout: str):
    world_size = 2 if layout else 1
    flags = f"{FREEZE} {layout}"
    whole = train(ranks, run_of(tmp_path / "whole", flags, world_size=world_size))
    train(ranks, run_of(tmp_path / "cut", flags, world_size=world_size, stop=True))
    names = " ".join(saved_keys(tmp_path / "cut"))
    assert "embed_tokens" in names and "layers.1.mlp.down" in names
    resumed = train(ranks, run_of(tmp_path / "cut", flags, world_size=world_size))
    for (losses, tensors), (wanted_losses, wanted) in zip(resumed, whole, strict=True):
        assert losses.keys() == {ITERATIONS} if losses else True
        assert all(wanted_losses[at] == value for at, value in losses.items())
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)
        assert not [key for key in tensors if key[0].startswith(("exp_avg", "master")) and "layers.0." in key[0]]


def resume(run: RunConfig) -> tuple[list[str], dict[str, float], dict[str, bool]]:
    """On a rank: loads, and returns what is said of changes, the sum of magnitudes of every first moment here, and for each average here
    whether it is the weight.
    """
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank() if dist.is_initialized() else 0)
    state = TrainState.build_for_load(run, mesh)
    assert run.checkpoint.load is not None and state.load(run.checkpoint.load)
    sizes: dict[str, float] = {}
    for kind, _, shard, view in state.optimizer.moments():
        if kind == "exp_avg":
            sizes[shard.name] = sizes.get(shard.name, 0.0) + float(view.abs().sum())
    masters = [(shard.name, view) for _, shard, view in state.optimizer.master_weights()]
    averages = [chunk for component in state.added_components for chunk in component.chunks()]
    equal: dict[str, bool] = {}
    for (name, master), average in zip(masters, averages, strict=bool(averages)):
        equal[name] = equal.get(name, True) and torch.equal(master, average.tensor)
    return state.resume_changes, sizes, equal


@diagonal(2)
@pytest.mark.parametrize("layout", ["", ZERO3])
def test_other_parameters_are_frozen_on_resume(ranks: RankPool, tmp_path: Path, layout: str):
    world_size = 2 if layout else 1
    layout += " --ema-decay 0.5"
    train(ranks, run_of(tmp_path, f"{FREEZE} {layout}", world_size=world_size, stop=True))
    other = run_of(tmp_path, f"--freeze head.* layers.1.* {layout}", world_size=world_size)
    found = [resume(other)] if world_size == 1 else ranks.run(resume, world_size, other)
    for changes, sizes, equal in found:
        assert any(change.startswith("freeze [") and "layers.1.*" in change for change in changes)
        for title in ("optimizer state", "averaged weights"):
            assert any(change.startswith(f"not in the checkpoint: {title} of embedding.weight, ") for change in changes)
            assert any(change.startswith(f"left in the checkpoint: {title} of head.weight, ") for change in changes)
        assert all(equal[name] == name.startswith(("layers.0.", "embedding.")) for name in equal), equal
        assert not any(name.startswith(("layers.1.", "head.")) for name in sizes)
        assert all(sizes[name] == 0.0 for name in sizes if name.startswith(("layers.0.", "embedding.")))
        assert sizes["norm.weight"] > 0.0
    train(ranks, other)


def test_free_run_continues_frozen_in_another_layout(ranks: RankPool, tmp_path: Path):
    """A checkpoint of a run that froze nothing, as every one before, has more than is read; fewer are frozen, and all is read again."""
    train(ranks, run_of(tmp_path, "", stop=True))
    for changes, _, _ in ranks.run(resume, 2, run_of(tmp_path, f"{FREEZE} --pp 2", world_size=2)):
        assert any(
            change.startswith("left in the checkpoint: optimizer state of embedding.weight,") for change in changes
        )
    changes, sizes, _ = resume(run_of(tmp_path, ""))
    assert not any("freeze" in change or "froze" in change for change in changes) and all(sizes.values())


def test_moments_of_what_was_frozen_begin_anew_in_an_optimizer_that_was_used(tmp_path: Path):
    """SOAP's bases begin with the identity; everything else with zeros."""
    flags = "--optimizer soap --train-iters 2"
    train_first, used = run_of(tmp_path, f"{flags} {FREEZE}"), run_of(tmp_path, flags)
    run_loop(train_first)
    model = petatron.build_model(used, ParallelMesh.single())
    optimizer = petatron.build_optimizer(used, model)
    model.train_step(next(petatron.build_loader(used, model.mesh)))
    optimizer.step()
    petatron.load_checkpoint(str(tmp_path), model=model, optimizer=optimizer)
    for kind, _, shard, view in optimizer.moments():
        if shard.name.startswith("layers.0.") and view.dim() == 2:
            basis = torch.eye(view.shape[-1], dtype=view.dtype) if kind.endswith("_basis") else torch.zeros_like(view)
            assert torch.equal(view, basis), (kind, shard.name)


def read_only(run: RunConfig, folder: str) -> tuple[list[torch.Tensor], int]:
    """On a rank: its weights of a model that is opened without gradients, and the elements of gradients."""
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    flags = f"{ZERO3} --make-vocab-size-divisible-by 8".split()
    groups = petatron.from_pretrained(folder, mesh, flags=flags, dtype="bf16", gradients=False).param_groups
    grads = [grad for group in groups for grad in group.grads() if grad.device.type != "meta"]
    return [weight for group in groups for weight in group.weights()], sum(grad.numel() for grad in grads)


def test_sharded_model_that_is_only_read_has_shards_of_its_weights_alone(ranks: RankPool, tmp_path: Path):
    run = tiny_run("--bf16")
    model = petatron.build_model(run, ParallelMesh.single())
    model.save_pretrained(tmp_path / "model")
    count = sum(parameter.numel() for parameter in model.module.parameters())
    for weights, num_grads in ranks.run(read_only, 2, tiny_run(ZERO3, world_size=2), str(tmp_path / "model")):
        assert {weight.dtype for weight in weights} == {torch.bfloat16} and num_grads == 0
        assert sum(weight.numel() for weight in weights) == pytest.approx(count / 2, rel=0.02)
