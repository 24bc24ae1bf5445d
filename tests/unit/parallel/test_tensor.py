"""A matrix split along its output: gradients, and what their sum over the ranks runs beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from petatron.layers.norm import RMSNorm
from petatron.layers.ops.linear_op import GemmOp
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.parallel.tensor_parallel import ColumnParallelOp
from tests.dist import RankPool
from tests.unit.layers.logged import Logged

RANKS, S, B, D, OUT = 2, 4, 3, 6, 10


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaves(*, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The same values, whichever of sequences and tokens comes first in memory."""
    x = normal(S, B, D, seed=1)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x
    return x.requires_grad_(), normal(OUT, D, seed=2).requires_grad_()


def norm() -> RMSNorm:
    norm = RMSNorm(D, eps=1e-5).double()
    norm.load_state_dict({"weight": normal(D, seed=4)})
    return norm


def _backward(sequence: bool, batch_first: bool, postpones: bool) -> tuple[list[str], Tensor | None, Tensor]:
    """What happened when, the input's gradient, and the gradient of a rank's rows of the weight."""
    rank, log, taken = dist.get_rank(), [], torch.zeros(OUT // RANKS, D, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_all_reduce", "start_all_gather", "start_reduce_scatter"):
            patch.setattr(collectives, name, _logged(name, log))
        queue = WeightGradQueue()
        queue.accumulate = lambda weight, write: write(taken, True)
        axis = ParallelMesh(Layout(tp=RANKS), rank).tp
        x, weight = leaves(batch_first=batch_first)
        part = (x.chunk(RANKS)[rank] if sequence else x).detach().requires_grad_()
        product = ColumnParallelOp(axis, sequence, GemmOp(Logged(log), queue))
        y = product(norm().add_and_norm(part)[1], weight.chunk(RANKS)[rank].detach().requires_grad_())
        log.clear()
        gradient = normal(S, B, OUT, seed=3).chunk(RANKS, -1)[rank]
        if postpones:
            with queue.deferring("later"):
                y.backward(gradient)
            log.append("later")
            queue.compute_deferred("later")
        else:
            y.backward(gradient)
    return log, part.grad, taken


def _logged(name: str, log: list[str]) -> Callable[..., Handle]:
    begin, word = getattr(collectives, name), name.removeprefix("start_")

    def call(*args: Tensor | Axis) -> Handle:
        handle = begin(*args)
        log.append(f"{word} begins")

        def arrive() -> None:
            handle.wait()
            log.append(f"{word} is there")

        return Handle(on_complete=arrive)

    return call


SUMMED = ["g W", "all_reduce begins", "g^T x", "all_reduce is there"]
GATHERED = [
    "all_gather begins",
    "g W",
    "reduce_scatter begins",
    "all_gather is there",
    "g^T x",
    "reduce_scatter is there",
]
LATER = ["g W", "all_reduce begins", "all_reduce is there", "later", "g^T x"]


@pytest.mark.parametrize(
    ("sequence", "batch_first", "postpones", "order"),
    [
        (False, False, False, SUMMED),
        (False, True, False, SUMMED),
        (False, False, True, LATER),
        (True, False, False, GATHERED),
    ],
)
def test_communication_runs_beside_products(
    ranks: RankPool, sequence: bool, batch_first: bool, postpones: bool, order: list[str]
):
    x, weight = leaves(batch_first=batch_first)
    y = F.linear(norm().add_and_norm(x)[1].value, weight)
    x_grad, weight_grad = torch.autograd.grad(y, (x, weight), normal(S, B, OUT, seed=3))
    found = ranks.run(_backward, RANKS, sequence, batch_first, postpones)
    assert all(log == order for log, _, _ in found)
    torch.testing.assert_close(torch.cat([taken for *_, taken in found]), weight_grad)
    parts = x_grad.chunk(RANKS) if sequence else [x_grad] * RANKS
    for (_, mine, _), part in zip(found, parts, strict=True):
        torch.testing.assert_close(mine, part)


def test_one_rank_sends_nothing():
    mesh = ParallelMesh.single(torch.device("cpu"))
    x, weight = leaves(batch_first=False)
    ColumnParallelOp(mesh.tp, sequence_parallel=False)(x, weight).sum().backward()
    assert not list(mesh.record.events())
