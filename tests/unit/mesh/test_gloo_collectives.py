"""Collectives between CPUs in one round: every one against its definition, for any number of ranks, shape, stride, dtype and size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.mesh import collectives, gloo_collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool
from tests.longform import diagonal

SHAPES = [(), (1,), (7, 3), (5, 1, 3), (0, 4)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.0}
"""Relative: of sums of a few numbers around 100 that may nearly cancel, in the order the processor's vectors add them. A bfloat16 sum is
rounded once, from float32."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Differ in every rank and element; their sums are rounded in all floating-point dtypes."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    x = 100 * torch.randn(shape, dtype=torch.float64, generator=generator)
    return x.round().to(dtype) if dtype == torch.int64 else x.to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after each of them in memory."""
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


def _axis() -> Axis:
    return ParallelMesh(Layout(tp=dist.get_world_size()), dist.get_rank()).tp


COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The definition: one rank after the other, in float32 or wider."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype == torch.bfloat16 else part for part in parts]
    return functools.reduce(COMBINE[op], wide).to(dtype)


def _all_cases() -> dict[str, Tensor]:
    axis, found = _axis(), {}
    rank, size = axis.rank, axis.size
    for dtype in DTYPES:
        for shape in SHAPES:
            for layout in (torch.Tensor.contiguous, strided):
                case, x = f"{layout.__name__} {dtype} {shape}", layout(values(rank, shape, dtype))
                for op in COMBINE:
                    found[f"{case} {op}"] = collectives.all_reduce(layout(values(rank, shape, dtype)), axis, op=op)
                rows = layout(values(rank, (size, *shape), dtype))
                found[f"{case} gather"] = collectives.all_gather(rows, axis)
                found[f"{case} scatter"] = collectives.reduce_scatter(rows, axis)
                out = torch.empty((size, *shape), dtype=dtype)
                collectives.start_all_gather(out, x, axis).wait()
                found[f"{case} started gather"] = out
    return found


@diagonal(2)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_is_its_definition_and_the_same_bits_on_all_ranks(ranks: RankPool, size: int):
    found = ranks.run(_all_cases, size)
    checked, found_first = 0, {}
    for dtype in DTYPES:
        for shape in SHAPES:
            xs = [values(rank, shape, dtype) for rank in range(size)]
            rows = [values(rank, (size, *shape), dtype) for rank in range(size)]
            wanted = {op: reduced(xs, op) for op in COMBINE}
            wanted |= {"gather": torch.cat(rows), "started gather": torch.stack(xs)}
            for layout in ("contiguous", "strided"):
                for rank in range(size):
                    for name, tensor in (wanted | {"scatter": reduced(rows, "sum")[rank : rank + 1]}).items():
                        ours = found[rank].pop(f"{layout} {dtype} {shape} {name}")
                        assert ours.dtype == dtype, (layout, dtype, shape, name, rank)
                        exact = name in ("gather", "started gather", "max", "min") or dtype == torch.int64
                        torch.testing.assert_close(ours, tensor, rtol=0 if exact else ROUNDING[dtype], atol=0)
                        first = found_first.setdefault((layout, dtype, shape, name), ours)
                        assert name == "scatter" or torch.equal(ours, first), (layout, dtype, shape, name, rank)
                        checked += 1
    assert checked == size * len(DTYPES) * len(SHAPES) * 2 * 6 and not any(found)


LIMIT = 64


def _around_the_limit(elements: int) -> dict[str, Any]:
    """What an all-reduce and an all-gather of float64 return, and how many rings of gloo they took."""
    axis, rings = _axis(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_collectives, "ONE_ROUND_BYTES", LIMIT * 8 * axis.size)
        own_reduce, own_gather = dist.all_reduce, collectives.all_gather_into
        patch.setattr(dist, "all_reduce", lambda *a, **k: rings.append("all_reduce") or own_reduce(*a, **k))
        patch.setattr(collectives, "all_gather_into", lambda *a, **k: rings.append("all_gather") or own_gather(*a, **k))
        x = values(axis.rank, (elements,), torch.float64)
        gathered = collectives.all_gather(x, axis)
        return {"sum": collectives.all_reduce(x.clone(), axis), "gathered": gathered, "rings": rings}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("elements", "rings"), [(LIMIT, []), (LIMIT + 1, ["all_gather", "all_reduce"])])
def test_large_tensors_take_gloos_ring_with_the_same_result(
    ranks: RankPool, size: int, elements: int, rings: list[str]
):
    xs = [values(rank, (elements,), torch.float64) for rank in range(size)]
    found = ranks.run(_around_the_limit, size, elements)
    for result in found:
        assert result["rings"] == rings
        assert torch.equal(result["gathered"], torch.cat(xs))
        torch.testing.assert_close(result["sum"], sum(xs), rtol=1e-15, atol=1e-13)
        assert torch.equal(result["sum"], found[0]["sum"])


def _in_flight() -> dict[str, Any]:
    """Several collectives under way, waited for in another order, one of them in place."""
    axis = _axis()
    out, x = torch.empty(axis.size, 3), values(axis.rank, (3,), torch.float32)
    out[axis.rank] = x
    total, calls = x.clone(), []
    reduce = collectives.start_all_reduce(total, axis)
    gather = collectives.start_all_gather(out, out[axis.rank], axis, on_complete=lambda: calls.append(out.clone()))
    gather.wait()
    reduce.wait()
    reduce.wait()
    return {"total": total, "out": out, "calls": calls}


def test_a_started_collective_fills_its_output_once_it_is_waited_for(ranks: RankPool):
    xs = torch.stack([values(rank, (3,), torch.float32) for rank in range(3)])
    for found in ranks.run(_in_flight, 3):
        assert torch.equal(found["total"], xs.sum(0)), "a second wait adds nothing"
        assert torch.equal(found["out"], xs)
        assert len(found["calls"]) == 1 and torch.equal(found["calls"][0], xs), "the callback sees the whole output"
