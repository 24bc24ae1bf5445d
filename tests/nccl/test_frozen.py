"""Frozen weights over NCCL: bit-equal after 50 steps, in layouts that shard, gather and pass them on, while the others train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.train.build_run import build_loader, build_model, build_optimizer
from petatron.verify.proof_matrix import parse_entry
from tests.dist import RankPool
from tests.nccl.layouts import mesh_of, wide_flags, wide_run

STEPS = 50
LAYERS = 4
ZERO1 = "--use-distributed-optimizer --overlap-param-gather"
FSDP = "--data-parallel-sharding-strategy optim_grads_params"


def train(run: RunConfig) -> tuple[list[float], bool, bool, int]:
    """On a rank: losses; whether frozen weights are the same, and trained ones others; the elements of gradients and moments."""
    model = build_model(run, mesh_of(run))
    optimizer = build_optimizer(run, model)

    def weights(*, trainable: bool) -> list[Tensor]:
        groups = (group for group in model.param_groups if group.spec.trainable is trainable)
        return [weight.clone() for group in groups for weight in group.weights()]

    frozen, trained, losses = weights(trainable=False), weights(trainable=True), []
    for batches in build_loader(run, model.mesh):
        losses.append(model.train_step(batches))
        optimizer.step()
    same = all(map(torch.equal, frozen, weights(trainable=False)))
    moved = all(not torch.equal(*pair) for pair in zip(trained, weights(trainable=True), strict=True))
    state = sum(view.numel() for _, _, _, view in optimizer.moments())
    return [float(loss) for loss in losses], bool(frozen) and same, moved, state


@pytest.mark.parametrize(
    "layout",
    [
        "--dp 2 --overlap-grad-reduce",
        f"--dp 2 {ZERO1} --overlap-grad-reduce",
        f"--dp 2 {FSDP}",
        "--tp 2 --sequence-parallel",
        "--pp 2",
        "--pp 2 --pipeline-schedule zb-h1",
    ],
)
def test_frozen_weights_stay_to_the_bit(gpu_ranks: RankPool, layout: str):
    model = f"{wide_flags(parse_entry('dense:dp2').model_flags)} --num-layers {LAYERS} --seq-length 512"
    freeze = f"--freeze embedding.* layers.[0-{LAYERS - 3}].* --train-iters {STEPS}"
    alone, *_ = gpu_ranks.run(train, 1, wide_run(model, freeze), timeout_s=240)[0]
    results = gpu_ranks.run(train, 2, wide_run(model, f"{freeze} {layout}", world_size=2), timeout_s=240)
    assert all(same for _, same, _, _ in results[: 1 if layout.startswith("--pp") else 2])
    for losses, _, moved, state in results:
        assert losses == pytest.approx(alone, rel=2e-2) and losses[-1] < losses[0]
        assert moved or state == 0, "only a frozen pipeline stage trains nothing"
