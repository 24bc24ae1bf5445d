"""What one rank drops says nothing of what another does: neither between parts of a sequence, nor between stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petatron.layers.core_attention import CoreAttention
from petatron.layers.dropout import Dropout
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.context.zigzag import zigzag_positions
from petatron.train.build_run import build_loader, build_model
from petatron.validate import load_config
from tests.dist import RankPool
from tests.longform import diagonal

RATE, LENGTH = 0.3, 16
FLAGS = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --vocab-size 64 --mock-data "
    f"--hidden-dropout {RATE} --attention-dropout {RATE} --kv-channels {LENGTH} --micro-batch-size 8 --num-workers 0 "
    "--train-iters 1 --lr 1e-3 --eval-iters 0"
)


def masks(layout: str) -> dict[str, Tensor]:
    """What this rank's first layer drops in one step: of a residual branch, and of its attention weights."""
    run = load_config([*FLAGS.split(), *layout.split()], world_size=2).config
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    stage = next(iter(model.stages.values()))
    stage.embedding_dropout.probability = 0.0  # only the first stage has it: streams that start alike would drift apart
    block = next(iter(stage.layers.values()))
    held = [position for run in zigzag_positions(mesh.cp.rank, mesh.cp.size, LENGTH) for position in run]
    found: dict[str, Tensor] = {}

    def weights_for_outputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Equal scores and one-hot values: the output of a query is its row of attention weights."""
        q, k, v, *more = args
        one_hot = torch.eye(LENGTH, dtype=v.dtype)[held].view(-1, 1, 1, LENGTH)
        return (0 * q, 0 * k, 0 * v + one_hot, *more)

    def keep_attention(_: nn.Module, args: tuple[Any, ...], out_SBHE: Tensor) -> None:
        # Queries of the later half of what is held see the first half of the sequence, whichever rank holds them.
        found["attention"] = out_SBHE[len(held) // 2 :, ..., : LENGTH // 2] == 0

    def keep_hidden(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        found.setdefault("hidden", out == 0)

    for module in block.modules():
        if isinstance(module, CoreAttention):
            module.register_forward_pre_hook(weights_for_outputs)
            module.register_forward_hook(keep_attention)
        elif isinstance(module, Dropout):
            module.register_forward_hook(keep_hidden)
    model.train_step(next(build_loader(run, mesh)))
    return found


@diagonal(2)
@pytest.mark.parametrize(
    "layout", ["--cp 2", "--cp 2 --cp-comm-type all_gather", "--cp 2 --cp-comm-type a2a", "--pp 2"]
)
def test_ranks_drop_independently(ranks: RankPool, layout: str):
    one, two = ranks.run(masks, 2, layout)
    assert set(one) == set(two) == {"hidden", "attention"}
    for kind in one:
        first, second = one[kind].flatten(), two[kind].flatten()
        assert len(first) == len(second) >= 1000
        both = (first & second).double().mean()
        for dropped in (first, second):
            assert dropped.double().mean() == pytest.approx(RATE, abs=0.05), kind
        assert both == pytest.approx(RATE * RATE, abs=0.04), f"{kind}: equal masks would drop {RATE} together"
