"""What holds for every optimizer of the package: a skipped step leaves no trace, and memory is what the rule declares."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import petatron
from petatron.config.schema.optimizer import BUILT_IN_RULES, OptimizerConfig
from petatron.estimate.state_bytes import state_bytes
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.train.build_run import build_model, build_optimizer
from tests.longform import diagonal
from tests.unit.optim.test_muon import Block, fill_gradients, flatten

EXPERTS = "--num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 16"


@diagonal(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_a_skipped_step_changes_nothing(name: str, first: bool, dtype: torch.dtype):
    """Neither at the start, where state is zero, nor later."""
    torch.manual_seed(4)
    config = OptimizerConfig(optimizer=name, lr=1e-2, weight_decay=0.1, adafactor_beta1=0.9)
    groups = flatten(Block().to(dtype), config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())

    def everything() -> list[Tensor]:
        state = [*optimizer.master_weights()], [*optimizer.moments()]
        return [g.flat_weights.clone() for g in groups] + [one[-1].clone() for part in state for one in part]

    if not first:
        fill_gradients(groups, 1)
        optimizer.step()
    before, counted = everything(), optimizer.scalar_state().get("updates")
    fill_gradients(groups, 2)
    groups[-1].grads()[0][3] = math.nan
    assert optimizer.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert optimizer.scalar_state().get("updates") == counted
    fill_gradients(groups, 3)
    assert not optimizer.step().skipped
    after = everything()
    assert all(tensor.isfinite().all() for tensor in after)
    assert not any(torch.equal(a, b) for a, b in zip(before[: len(groups)], after))


@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_a_frozen_parameter_keeps_its_state(name: str):
    torch.manual_seed(4)
    config = OptimizerConfig(optimizer=name, lr=1e-2, weight_decay=0.1, soap_precondition_frequency=1)
    model = Block()
    groups = flatten(model, config)
    optimizer = MixedPrecisionOptimizer(config, groups, ParallelMesh.single())

    def state() -> dict[tuple[str, str], Tensor]:
        weights = {("weight", shard.name): view for _, shard, view in optimizer.master_weights()}
        moments = {(kind, shard.name): view for kind, _, shard, view in optimizer.moments()}
        return {key: view.clone() for key, view in (weights | moments).items()}

    fill_gradients(groups, 1)
    optimizer.step()
    model.get_parameter("layers.0.attention.out.weight").requires_grad_(False)
    before = state()
    fill_gradients(groups, 2)
    optimizer.step()
    for (kind, tensor), values in state().items():
        same = torch.equal(values, before[kind, tensor])
        assert same is (tensor == "layers.0.attention.out.weight"), (kind, tensor)


@diagonal(3)
@pytest.mark.parametrize("flags", ["--bf16", "", f"--bf16 {EXPERTS}"])
@pytest.mark.parametrize("name", BUILT_IN_RULES)
def test_declared_bytes_are_those_allocated(name: str, flags: str):
    train = (
        "--mock-data --lr 1e-3 --train-iters 1 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --vocab-size 128"
    )
    run = petatron.load("tiny-llama", f"{train} --optimizer {name} {flags}".split()).config
    optimizer = build_optimizer(run, build_model(run, petatron.launch(run)))
    held = {(kind, view.data_ptr()): view.nbytes for kind, _, _, view in optimizer.moments()}
    assert state_bytes(run).moments == sum(held.values())


def test_nobody_compares_the_name_of_an_optimizer():
    """Declarations are asked instead; benchmarks measure peers with AdamW alone, a resumed run has the checkpoint's optimizer, and
    Megatron's files have a place for the state of Adam alone, in two forms.
    """
    package = Path(petatron.__file__).parent
    pattern = re.compile(r"optimizer (==|!=|in) [\"'({]")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert found <= {
        "bench/train.py",
        "config/optimizer_registry.py",
        "pretrained/convert_model.py",
        "pretrained/stored_training_state.py",
        "train/state/run_metadata.py",
    }
