"""The gradient of a table of embeddings: plain and in Triton, in order, with and without what was there before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels import embedding_grad as embedding
from tests.longform import diagonal

ROWS = 40


def triton_version() -> Callable[..., None]:
    pytest.importorskip("triton")
    from petatron.kernels.triton.embedding_grad import embedding_grad

    return embedding_grad


VERSIONS = {"plain": lambda: embedding.embedding_grad, "triton": triton_version}


def draw(kind: str) -> Tensor:
    """Token ids: few repeats, mostly repeats, segments that end with a window, other ranks' ids, few that are none of those,
    one id over 17 windows."""
    if kind == "spread":
        return torch.randint(ROWS, (50,))
    if kind == "frequent":
        return torch.where(torch.rand(100) < 0.7, 3, torch.randint(ROWS, (100,)))
    if kind == "windows":
        return torch.tensor([5] * 32 + [6] * 64 + [7] * 31 + [8] * 2 + [9])[torch.randperm(130)]
    if kind == "elsewhere":
        return torch.randint(-ROWS, 2 * ROWS, (90,))
    if kind == "mostly elsewhere":  # before the first and after the last row here, over several windows
        here = torch.tensor([0] * 3 + [1] * 40 + [ROWS - 1] * 2)
        return torch.cat((torch.full((70,), -1), torch.full((50,), ROWS), here))[torch.randperm(165)]
    if kind == "all elsewhere":
        return torch.tensor([-1, ROWS, -(1 << 31), (1 << 31) - 1]).repeat(20)
    if kind == "one":
        return torch.full((1,), 39)
    return torch.cat((torch.full((560,), 1), torch.tensor([0, 2, 2])))[torch.randperm(563)]


KINDS = ("spread", "frequent", "windows", "elsewhere", "mostly elsewhere", "all elsewhere", "one", "long")


def expected(ids: Tensor, grad: Tensor) -> Tensor:
    """By autograd, with the ids that are not here sent to a row that is thrown away."""
    table = torch.zeros(ROWS + 1, grad.shape[1], dtype=torch.float64, requires_grad=True)
    here = (ids >= 0) & (ids < ROWS)
    F.embedding(torch.where(here, ids, ROWS), table).backward(grad.double())
    assert table.grad is not None
    return table.grad[:ROWS]


@diagonal(4)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("kind", "accumulate"),
    [
        *((kind, False) for kind in KINDS[:-1]),
        *((kind, True) for kind in ("spread", "windows", "mostly elsewhere", "all elsewhere", "long")),
    ],
)
def test_sums_of_the_tokens_of_a_row(version: str, kind: str, accumulate: bool):
    ids = draw(kind)
    grad = torch.randn(len(ids), 24, dtype=torch.bfloat16)
    here = (ids >= 0) & (ids < ROWS)
    grad[~here] = float("nan")  # nobody may read it
    before = torch.randn(ROWS, 24) if accumulate else torch.full((ROWS, 24), float("nan"))
    out = before.clone()
    VERSIONS[version]()(ids, grad, out, accumulate=accumulate)
    true = expected(ids, grad)
    untouched = torch.ones(ROWS, dtype=torch.bool)
    untouched[ids[here]] = False
    assert torch.equal(out[untouched], before[untouched] if accumulate else torch.zeros_like(before[untouched]))
    torch.testing.assert_close(out.double(), true + before if accumulate else true, rtol=1e-5, atol=2e-5)


def test_more_columns_than_a_block_and_rows_that_lie_apart():
    ids, grad = draw("spread")[:40], torch.randn(40, 1300)[:, :1100]
    out = torch.empty(ROWS, 1100)
    triton_version()(ids, grad, out, accumulate=False)
    torch.testing.assert_close(out.double(), expected(ids, grad), rtol=1e-5, atol=2e-5)


def test_tokens_are_added_in_order():
    """Small ones first would count; after the large ones they vanish. The result is that of the order of the tokens, of
    which those with another rank's id are none."""
    ids, grad = torch.tensor([-1, 0, 1, 0, 0, -9, 0, 0]), torch.tensor([5.0, 1e8, 5.0, 1.0, -1e8, 5.0, 1.0, 1.0])
    out = torch.empty(1, 1)
    triton_version()(ids, grad.unsqueeze(1), out, accumulate=False)
    assert out.tolist() == [[2.0]]


def test_float64_for_proofs():
    ids, grad = draw("elsewhere"), torch.randn(90, 7, dtype=torch.float64)
    out = torch.empty(ROWS, 7, dtype=torch.float64)
    embedding.embedding_grad(ids, grad, out, accumulate=False)
    torch.testing.assert_close(out, expected(ids, grad))
