"""Every collective against its definition on three ranks, gradients against one process, and what the record says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.kernels.fp8.amax import amax_of, attach_amax, attached_amax
from petatron.mesh import collectives, json_collectives
from petatron.mesh.gloo_collectives import ONE_ROUND_BYTES
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from tests.dist import RankPool

RANKS = 3
PAIRS: dict[str, Callable[..., Tensor]] = {
    "copy": collectives.copy_to_region,
    "reduce": collectives.reduce_from_region,
    "gather": collectives.gather_from_region,
    "scatter": collectives.reduce_scatter_to_region,
}


def values(rank: int, rows: int = 6, *, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(rows, 2, dtype=torch.float64, generator=generator)


def _plain() -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = ParallelMesh(Layout(tp=RANKS), rank)
    tp, x = mesh.tp, values(rank)
    turned = x.t().contiguous().t()  # same values, columns first in memory
    handle = collectives.start_all_reduce(started := x.clone(), tp)
    handle.wait()
    return {
        "sum": collectives.all_reduce(x.clone(), tp),
        "max": collectives.all_reduce(x.clone(), tp, op="max"),
        "min": collectives.all_reduce(x.clone(), tp, op="min"),
        "started": started,
        "gathered": collectives.all_gather(turned, tp),
        "scattered": collectives.reduce_scatter(turned, tp),
        "sent": collectives.broadcast(x.clone(), tp, source=1),
        "objects": json_collectives.all_gather_json({"rank": rank}, tp),
        "barrier": collectives.barrier(tp),
        "part": collectives.local_slice(x, tp),
        "untouched": torch.equal(x, values(rank)) and torch.equal(turned, x),
        "events": [(e.axis, e.op, e.elements, e.bytes, e.dtype, e.caller) for e in mesh.record.events()],
    }


def test_plain_collectives(ranks: RankPool):
    results = ranks.run(_plain, RANKS)
    xs = torch.stack([values(rank) for rank in range(RANKS)])
    total = xs[0] + xs[1] + xs[2]
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["sum"], total, rtol=0, atol=1e-15)
        assert torch.equal(found["started"], found["sum"])
        assert torch.equal(found["max"], xs.amax(0)) and torch.equal(found["min"], xs.amin(0))
        assert torch.equal(found["gathered"], xs.flatten(0, 1))
        torch.testing.assert_close(found["scattered"], total[2 * rank : 2 * rank + 2], rtol=0, atol=1e-15)
        assert torch.equal(found["sent"], xs[1])
        assert found["objects"] == [{"rank": other} for other in range(RANKS)]
        assert torch.equal(found["part"], xs[rank, 2 * rank : 2 * rank + 2])
        assert found["untouched"]
        assert torch.equal(found["sum"], results[0]["sum"]), "ranks must agree to the last bit"


def test_plain_collectives_are_recorded(ranks: RankPool):
    whole, gathered = 12, 36
    expected = [
        *[("all_reduce", whole)] * 4,
        ("all_gather", gathered),
        ("reduce_scatter", whole),
        ("broadcast", whole),
        ("gather_objects", 0),
        ("barrier", 0),
    ]
    for found in ranks.run(_plain, RANKS):
        assert [(op, elements) for _, op, elements, *_ in found["events"]] == expected
        for axis, _, elements, size, dtype, caller in found["events"]:
            assert axis == "tp"
            assert size == elements * dtype.itemsize and (elements == 0 or dtype == torch.float64)
            assert caller.startswith("mesh/test_collectives.py:") and caller.endswith(" _plain")


def _pair(name: str, same_input: bool, same_grad: bool, in_rows: int, out_rows: int) -> dict[str, Any]:
    rank = dist.get_rank()
    mesh = ParallelMesh(Layout(tp=RANKS), rank)
    x = values(0 if same_input else rank, in_rows).requires_grad_()
    upstream = values(0 if same_grad else rank, out_rows, salt=1)
    out = PAIRS[name](x, mesh.tp)
    ahead = mesh.record.count
    out.backward(upstream)
    assert torch.equal(x.detach(), values(0 if same_input else rank, in_rows)), "the input was changed in place"
    assert torch.equal(upstream, values(0 if same_grad else rank, out_rows, salt=1)), (
        "the gradient was changed in place"
    )
    events = [
        (event.op, event.elements, event.sequence_number <= ahead, event.caller) for event in mesh.record.events()
    ]
    return {"out": out.detach(), "grad": x.grad, "events": events}


def _leaves(count: int, rows: int) -> list[Tensor]:
    return [values(rank, rows).requires_grad_() for rank in range(count)]


def check(found: list[dict[str, Any]], outs: list[Tensor], upstream: list[Tensor], leaves: list[Tensor]) -> None:
    """`outs` are the ranks' outputs computed in this process from `leaves`; every distinct output counts once."""
    distinct = list({id(out): (out, grad) for out, grad in zip(outs, upstream)}.values())
    torch.autograd.backward([out for out, _ in distinct], [grad for _, grad in distinct])
    for rank, result in enumerate(found):
        torch.testing.assert_close(result["out"], outs[rank].detach(), rtol=0, atol=1e-15)
        torch.testing.assert_close(result["grad"], leaves[rank % len(leaves)].grad, rtol=0, atol=1e-15)


def test_copy_gradient(ranks: RankPool):
    """One activation used by every rank: its gradient is the sum of what each rank sends back."""
    found = ranks.run(_pair, RANKS, "copy", True, False, 6, 6)
    [x] = _leaves(1, 6)
    check(found, [x * 1.0 for _ in range(RANKS)], [values(rank, 6, salt=1) for rank in range(RANKS)], [x])
    assert [event[:3] for event in found[0]["events"]] == [("all_reduce", 12, False)]


def test_reduce_gradient(ranks: RankPool):
    """One sum that every rank holds, with one gradient."""
    found = ranks.run(_pair, RANKS, "reduce", False, True, 6, 6)
    xs = _leaves(RANKS, 6)
    total = xs[0] + xs[1] + xs[2]
    check(found, [total] * RANKS, [values(0, 6, salt=1)] * RANKS, xs)
    assert [event[:3] for event in found[0]["events"]] == [("all_reduce", 12, True)]


def test_gather_gradient(ranks: RankPool):
    found = ranks.run(_pair, RANKS, "gather", False, False, 2, 6)
    xs = _leaves(RANKS, 2)
    check(found, [torch.cat(xs) for _ in range(RANKS)], [values(rank, 6, salt=1) for rank in range(RANKS)], xs)
    assert [event[:3] for event in found[0]["events"]] == [("all_gather", 12, True), ("reduce_scatter", 12, False)]


def test_scatter_gradient(ranks: RankPool):
    found = ranks.run(_pair, RANKS, "scatter", False, False, 6, 2)
    xs = _leaves(RANKS, 6)
    total = xs[0] + xs[1] + xs[2]
    outs = [total[2 * rank : 2 * rank + 2] for rank in range(RANKS)]
    check(found, outs, [values(rank, 2, salt=1) for rank in range(RANKS)], xs)
    assert [event[:3] for event in found[0]["events"]] == [("reduce_scatter", 12, True), ("all_gather", 12, False)]


def test_the_caller_is_the_code_that_asked_not_autograd(ranks: RankPool):
    [first, *_] = ranks.run(_pair, RANKS, "gather", False, False, 2, 6)
    for *_, caller in first["events"]:
        assert caller.startswith("mesh/test_collectives.py:") and caller.endswith(" _pair"), caller


def test_one_rank_is_the_identity_and_leaves_no_record():
    mesh = ParallelMesh.single()
    axis, x = mesh.tp, values(0).requires_grad_()
    for ask in (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter, *PAIRS.values()):
        assert ask(x, axis) is x
    assert collectives.all_reduce(x, axis, op="max") is x
    assert collectives.broadcast(x, axis) is x
    assert torch.equal(collectives.local_slice(x, axis), x)
    assert json_collectives.all_gather_json("only me", axis) == ["only me"]
    collectives.start_all_reduce(x, axis).wait()
    collectives.barrier(axis)
    assert mesh.record.count == 0


def _uneven() -> str:
    mesh = ParallelMesh(Layout(tp=2), dist.get_rank())
    with pytest.raises(AssertionError) as caught:
        collectives.reduce_scatter(torch.zeros(3, 2), mesh.tp)
    return str(caught.value)


def test_uneven_scatter_is_refused_before_anything_is_sent(ranks: RankPool):
    assert ranks.run(_uneven, 2) == ["3 rows cannot be scattered over 2 ranks"] * 2


def _changes(elements: int) -> dict[str, bool]:
    """Whether a change in place by each collective is known of."""
    tp = ParallelMesh(Layout(tp=RANKS), dist.get_rank()).tp
    found = {}
    for name, change in (("all_reduce", collectives.all_reduce), ("broadcast", collectives.broadcast)):
        x, weight = torch.full((elements,), 2.0), torch.ones(elements, requires_grad=True)
        attach_amax(x, amax_of(x))
        total = (weight * x).sum()
        change(x, tp)
        found[f"{name}: amax"] = attached_amax(x) is None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
    with torch.inference_mode():  # whose tensors have no version
        found["inference"] = float(collectives.all_reduce(torch.ones(elements), tp)[-1]) == RANKS
    return found


@pytest.mark.parametrize("elements", [4, ONE_ROUND_BYTES])
def test_a_change_in_place_is_counted(ranks: RankPool, elements: int):
    """By gloo's own algorithms, which count nothing, as by those in one round: a note of what was there would be wrong."""
    found = ranks.run(_changes, RANKS, elements)
    assert all(all(rank.values()) for rank in found), found
