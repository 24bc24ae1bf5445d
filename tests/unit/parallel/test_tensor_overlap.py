"""Tensor-parallel overlap in the forward pass: what is launched when, and that results and saved tensors are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.linear_gemms import PlainGemm
from petatron.layers.ops.linear_op import GemmOp
from petatron.layers.ops.recompute_output import RecomputableOutput
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.tensor_parallel import AllGatherOverlap, ColumnParallelOp, ReduceScatterOverlap, RowParallelOp
from tests.dist import RankPool
from tests.longform import diagonal
from tests.unit.models.kept import kept_bytes

S, B, D, OUT = 16, 3, 8, 12


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def laid_out(x: Tensor, *, batch_first: bool) -> Tensor:
    """A copy of [S, B, D] with sequences or tokens first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()


class LoggedGemm(PlainGemm):
    """A plain multiplication that logs the chunks it computes: number of blocks x rows of each."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        self.log.append(f"GEMM {x_NRD.shape[0]} x {x_NRD.shape[1]}")
        super().forward_into(x_NRD, weight, out_NRO)


def _logged(name: str, log: list[str]) -> Callable[..., Handle]:
    start, word = getattr(collectives, name), name.removeprefix("start_")

    def call(out: Tensor, x: Tensor, axis: Axis) -> Handle:
        number = sum(line.startswith(f"start {word}") for line in log)
        handle = start(out, x, axis)
        log.append(f"start {word} {number}")

        def wait() -> None:
            handle.wait()
            log.append(f"wait {word} {number}")

        return Handle(on_complete=wait)

    return call


@dataclass(frozen=True)
class Case:
    """One linear on every rank; `saves`: the GEMM itself saves its input, as in a recomputed region."""

    kind: str
    chunks: int
    batch: int | None = B
    batch_first: bool = False
    saves: bool = False

    def run(self) -> tuple[list[str], Tensor, Tensor, Tensor, Tensor]:
        """On one rank: the log of the forward pass, output, and gradients of input, weight and bias."""
        log: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("start_all_gather", "start_reduce_scatter"):
                patch.setattr(collectives, name, _logged(name, log))
            axis = ParallelMesh(Layout(tp=dist.get_world_size()), dist.get_rank()).tp
            mine = {name: parts[axis.rank] for name, parts in self.parts(axis.size).items()}
            x, weight, grad, bias = (mine[name] for name in ("x", "weight", "grad", "bias"))
            bias = bias.clone().requires_grad_()
            x, weight = laid_out(x, batch_first=self.batch_first).requires_grad_(), weight.contiguous().requires_grad_()
            y = self.linear(axis, GemmOp(LoggedGemm(log)))(x.view_as(x), weight, bias)
            forward = list(log)
            y.backward(grad)
        assert x.grad is not None and weight.grad is not None and bias.grad is not None
        return forward, y.detach(), x.grad, weight.grad, bias.grad

    def linear(self, axis: Axis, multiply: GemmOp) -> ColumnParallelOp | Callable[[Tensor, Tensor, Tensor], Tensor]:
        if self.kind == "column":
            overlap = AllGatherOverlap(axis, self.chunks)
            return ColumnParallelOp(axis, True, multiply, regather=not self.saves, overlap=overlap)
        product = RowParallelOp(axis, True, multiply, overlap=ReduceScatterOverlap(axis, self.chunks))
        return (lambda x, *weights: product(RecomputableOutput(x, None), *weights)) if self.saves else product

    def whole(self) -> dict[str, Tensor]:
        mid = () if self.batch is None else (self.batch,)
        shapes = {"x": (S, *mid, D), "weight": (OUT, D), "grad": (S, *mid, OUT), "bias": (OUT,)}
        return {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}

    def parts(self, ranks: int) -> dict[str, tuple[Tensor, ...]]:
        """What each rank has of input, weight, bias and the output's gradient."""
        column = {"x": 0, "weight": 0, "grad": -1, "bias": 0}
        dims = column if self.kind == "column" else {"x": -1, "weight": 1, "grad": 0}
        parts = {name: (whole,) * ranks for name, whole in self.whole().items()}
        return parts | {name: parts[name][0].chunk(ranks, dim) for name, dim in dims.items()}

    def check(self, found: list[tuple[list[str], Tensor, Tensor, Tensor, Tensor]]) -> None:
        """The ranks' results are parts of those of one process."""
        whole = self.whole()
        x, weight, bias = (whole[name].requires_grad_() for name in ("x", "weight", "bias"))
        y = F.linear(x, weight, bias)
        y.backward(whole["grad"])
        assert x.grad is not None and weight.grad is not None and bias.grad is not None
        dims = (-1, 0, 0) if self.kind == "column" else (0, -1, 1)
        _, *parts, bias_grads = zip(*found, strict=True)
        for dim, true, of_ranks in zip(dims, (y, x.grad, weight.grad), parts, strict=True):
            torch.testing.assert_close(torch.cat(of_ranks, dim), true, rtol=1e-12, atol=1e-12)
        # Each rank has the rows of its part of the sequence, or all rows of its outputs.
        total = torch.cat(bias_grads) if self.kind == "column" else sum(bias_grads)
        torch.testing.assert_close(total, bias.grad, rtol=1e-12, atol=1e-12)


def test_all_gathers_start_before_the_gemms_that_need_none_of_them(ranks: RankPool):
    """Chunks of 3, 3 and 2 of the 8 tokens that each rank has; the own part is one GEMM without communication."""
    case = Case("column", 3)
    found = ranks.run(case.run, 2)
    order = [
        *(f"start all_gather {number}" for number in range(3)),
        f"GEMM 1 x {8 * B}",
        *("wait all_gather 0", f"GEMM 1 x {3 * B}"),
        *("wait all_gather 1", f"GEMM 1 x {3 * B}"),
        *("wait all_gather 2", f"GEMM 1 x {2 * B}"),
    ]
    assert [log for log, *_ in found] == [order] * 2
    case.check(found)


def test_a_chunk_is_reduce_scattered_before_the_next_gemm(ranks: RankPool):
    case = Case("row", 3)
    found = ranks.run(case.run, 2)
    order = [
        *(f"GEMM 2 x {3 * B}", "start reduce_scatter 0"),
        *(f"GEMM 2 x {3 * B}", "start reduce_scatter 1"),
        *(f"GEMM 2 x {2 * B}", "start reduce_scatter 2"),
        *(f"wait reduce_scatter {number}" for number in range(3)),
    ]
    assert [log for log, *_ in found] == [order] * 2
    case.check(found)


def test_ranks_before_and_after_the_own_one_are_two_gemms(ranks: RankPool):
    case = Case("column", 2)
    found = ranks.run(case.run, 4)
    gemms = [[line for line in log if line.startswith("GEMM")] for log, *_ in found]
    ends, own = [f"GEMM 3 x {2 * B}"], f"GEMM 1 x {4 * B}"
    assert gemms[0] == gemms[3] == [own, *ends, *ends]
    assert gemms[1] == [own, *(f"GEMM 1 x {2 * B}", f"GEMM 2 x {2 * B}") * 2]
    case.check(found)


@diagonal(2)
@pytest.mark.parametrize(
    "case",
    [
        Case("column", 9),
        Case("row", 9),
        Case("column", 2, batch=None),
        Case("row", 3, batch=None),
        Case("column", 3, batch_first=True),
        Case("row", 3, batch_first=True),
        Case("row", 2, batch_first=True, saves=True),
        Case("column", 3, saves=True),
        Case("row", 3, saves=True),
    ],
    ids=str,
)
def test_equals_one_process(ranks: RankPool, case: Case):
    """More chunks than tokens, no batch dimension, batch-first memory, inputs that the GEMM saves."""
    case.check(ranks.run(case.run, 4))


def _saved(regather: bool) -> list[int]:
    """Bytes that a column linear and a row linear save without overlap, then with it."""
    axis = ParallelMesh(Layout(tp=2), dist.get_rank()).tp
    x, weight = normal(S, B, D, seed=1).requires_grad_(), normal(OUT, D, seed=2).requires_grad_()
    linears = [
        ColumnParallelOp(axis, True, regather=regather),
        RowParallelOp(axis, True),
        ColumnParallelOp(axis, True, regather=regather, overlap=AllGatherOverlap(axis, 3)),
        RowParallelOp(axis, True, overlap=ReduceScatterOverlap(axis, 3)),
    ]
    return [kept_bytes(lambda: linear(x.view_as(x), weight), without=[x, weight])[0] for linear in linears]  # noqa: B023


@pytest.mark.parametrize("regather", [True, False])
def test_saves_as_much_for_backward_as_without(ranks: RankPool, regather: bool):
    gathered = 0 if regather else 2 * S * B * D * 8
    for found in ranks.run(_saved, 2, regather):
        assert found == [gathered, 0, gathered, 0]
