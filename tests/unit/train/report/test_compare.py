"""The comparison itself: every kind of departure is reported, and only departures are."""

import math

import pytest
import torch
from torch import Tensor

from petatron.mesh.mesh import ParallelMesh
from petatron.verify.compare_traces import TOLERANCES, Tolerances, compare_traces
from petatron.verify.record_trace import Injection, StepTrace, TracedShard, assemble_tensors, record_steps
from tests.longform import diagonal
from tests.parity.harness import tiny_run

TIGHT = Tolerances(loss=1e-9, gradient=1e-8, parameter=1e-7)


def part(kind: str, name: str, values: Tensor) -> TracedShard:
    return TracedShard(kind, name, tuple(values.shape), (0,) * values.dim(), values.double())


def step(number: int = 1, *, loss: float = 2.0, **changes: Tensor | None) -> StepTrace:
    """A step with gradients and parameters of `a` [4, 3] and `b` [3]; changes are named gradient_a, parameter_b, ..."""
    parts = []
    for kind in ("gradient", "parameter"):
        for name, shape in (("a", (4, 3)), ("b", (3,))):
            generator = torch.Generator().manual_seed(number * 10 + len(kind) + len(shape))
            values = changes.get(f"{kind}_{name}", torch.randn(shape, generator=generator, dtype=torch.float64))
            if values is not None:
                parts.append(part(kind, name, values))
    return StepTrace(loss, 1.0, parts)


def value(trace: StepTrace, kind: str, name: str) -> Tensor:
    return next(p.values for p in trace.shards if (p.kind, p.name) == (kind, name)).clone()


def verdict(reference: list[StepTrace], candidate: list[StepTrace], bounds: Tolerances = TIGHT):
    return compare_traces([reference], [candidate], bounds)


def test_equal_runs_agree():
    found = verdict([step(1), step(2)], [step(1), step(2)])
    assert found.agrees and found.first_departure is None and found.largest_loss_difference == 0.0
    assert [s.step for s in found.steps] == [1, 2]
    assert [worst.difference for s in found.steps for worst in s.worst] == [0.0] * 4


def test_loss():
    found = verdict([step(1), step(2, loss=2.0)], [step(1), step(2, loss=2.0 + 1e-6)])
    assert found.first_departure == "step 2: loss differs by 5.0e-07 (bound 1e-09)"
    assert found.largest_loss_difference == pytest.approx(5e-7)


def test_the_loss_of_every_rank_counts():
    found = compare_traces([[step()]], [[step()], [StepTrace(2.0002, 1.0)]], TIGHT)
    assert found.first_departure == "step 1: loss differs by 1.0e-04 (bound 1e-09)"
    assert found.steps[0].candidate_loss == 2.0002


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
def test_a_replica_that_drifts_is_named(kind: str):
    """Two data-parallel ranks hold the same tensors; the second one's copy is off, whichever comes last."""
    drifted = step(**{f"{kind}_b": value(step(), kind, "b") + 1e-3})
    for ranks in ([[step()], [drifted]], [[drifted], [step()]]):
        found = compare_traces([[step()]], ranks, TIGHT)
        assert found.first_departure is not None and f"{kind} b" in found.first_departure


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
def test_tensors_are_named_and_the_worst_one_is_shown(kind: str):
    a, b = value(step(), kind, "a"), value(step(), kind, "b")
    found = verdict([step()], [step(**{f"{kind}_a": a * (1 + 1e-5), f"{kind}_b": b * (1 + 1e-3)})])
    bound = {"gradient": "1e-08", "parameter": "1e-07"}[kind]
    assert found.first_departure == f"step 1: {kind} b differs by 1.0e-03 (bound {bound})"


def test_within_the_bounds_is_agreement_and_a_hair_beyond_is_not():
    gradient = value(step(), "gradient", "a")
    assert verdict([step()], [step(gradient_a=gradient * (1 + 0.9e-8))]).agrees
    assert not verdict([step()], [step(gradient_a=gradient * (1 + 1.1e-8))]).agrees


def test_the_first_departure_is_the_first_in_the_order_of_a_run():
    off = {"gradient_a": torch.zeros(4, 3), "parameter_a": torch.zeros(4, 3)}
    early_parameter = verdict([step(1), step(2)], [step(1, parameter_b=torch.ones(3)), step(2, loss=9.0)])
    assert early_parameter.first_departure is not None and "step 1: parameter b" in early_parameter.first_departure
    all_at_once = verdict([step()], [step(loss=9.0, **off)])
    assert all_at_once.first_departure is not None and "step 1: loss" in all_at_once.first_departure
    gradient_first = verdict([step()], [step(**off)])
    assert gradient_first.first_departure is not None and "step 1: gradient a" in gradient_first.first_departure


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_missing_tensor(kind: str, side: str):
    whole, lacking = step(), step(**{f"{kind}_b": None})
    runs = ([lacking], [whole]) if side == "reference" else ([whole], [lacking])
    found = verdict(*runs)
    assert found.first_departure is not None and f"{kind} b differs by inf" in found.first_departure


def test_other_shape():
    found = verdict([step()], [step(gradient_b=torch.zeros(4, dtype=torch.float64))])
    assert found.first_departure is not None and "gradient b differs by inf" in found.first_departure


@diagonal(3)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
@pytest.mark.parametrize("what", ["loss", "gradient", "parameter"])
def test_numbers_that_are_not_finite_never_agree(bad: float, side: str, what: str):
    if what == "loss":
        spoiled = step(loss=bad)
    else:
        values = value(step(), what, "a")
        values[1, 1] = bad
        spoiled = step(**{f"{what}_a": values})
    reference = [spoiled if side != "candidate" else step()]
    candidate = [spoiled if side != "reference" else step()]
    found = verdict(reference, candidate)
    expected = "loss" if what == "loss" else f"{what} a"
    assert found.first_departure is not None and f"{expected} differs by inf" in found.first_departure


def test_step_count():
    found = verdict([step(1), step(2)], [step(1)])
    assert not found.agrees
    assert found.first_departure == "the reference made 2 steps, the layout 1"
    assert math.isinf(found.largest_loss_difference)


def test_a_hole_between_the_ranks_pieces_is_found():
    whole = step()
    halves = [StepTrace(2.0, 1.0, list(whole.shards)) for _ in range(2)]
    gradient = value(whole, "gradient", "a")
    for rank, trace in enumerate(halves):
        rows = slice(0, 2) if rank == 0 else slice(2, 3)  # nobody speaks for row 3
        trace.shards[0] = TracedShard("gradient", "a", (4, 3), (rows.start, 0), gradient[rows])
    found = compare_traces([[whole]], [[half] for half in halves], TIGHT)
    assert found.first_departure is not None and "gradient a differs by inf" in found.first_departure
    assert torch.equal(assemble_tensors(p for half in halves for p in half.shards)[("gradient", "a")][:3], gradient[:3])


def test_noise_over_noise_is_not_a_difference():
    """A gradient that is zero in exact arithmetic may come out as any rounding error, and so may what Adam makes of it."""
    noise, other_noise = torch.full((3,), 1e-17), torch.full((3,), -3e-17)
    reference = [step(gradient_b=noise, parameter_b=torch.ones(3))]
    candidate = [step(gradient_b=other_noise, parameter_b=-torch.ones(3))]
    assert verdict(reference, candidate).agrees
    # But a candidate whose noise has grown to something is wrong.
    grown = verdict(reference, [step(gradient_b=torch.full((3,), 1e-6), parameter_b=torch.ones(3))])
    assert grown.first_departure is not None and "gradient b" in grown.first_departure


def test_a_parameter_that_moved_once_is_compared_ever_after():
    quiet = torch.full((3,), 1e-17)
    reference = [step(1), step(2, gradient_b=quiet, parameter_b=torch.ones(3))]
    candidate = [step(1), step(2, gradient_b=quiet, parameter_b=1.1 * torch.ones(3))]
    found = verdict(reference, candidate)
    assert found.first_departure is not None and "step 2: parameter b" in found.first_departure


def test_a_small_tensor_is_held_to_its_share():
    """A difference is measured against the tensor itself, not drowned in a larger neighbor."""
    large, small = torch.full((4, 3), 1e3), torch.full((3,), 10.0)
    reference = [step(gradient_a=large, gradient_b=small)]
    found = verdict(reference, [step(gradient_a=large, gradient_b=small * 1.001)])
    assert found.first_departure == "step 1: gradient b differs by 1.0e-03 (bound 1e-08)"


def test_zero_tensors():
    zeros = {"gradient_a": torch.zeros(4, 3), "gradient_b": torch.zeros(3)}
    assert verdict([step(**zeros)], [step(**zeros)]).agrees
    found = verdict([step(**zeros)], [step(**{**zeros, "gradient_b": torch.full((3,), 1e-12)})])
    assert found.first_departure is not None and "gradient b differs by inf" in found.first_departure


def test_an_injected_fault_is_found_where_it_was_put():
    run = tiny_run("--train-iters 4 --num-layers 1", dtype="float64")

    def traces(injection: Injection | None) -> list[StepTrace]:
        return list(record_steps(run, ParallelMesh.single(), injection=injection))

    reference = traces(None)
    assert compare_traces([reference], [traces(None)], TOLERANCES["float64"]).agrees
    for name in ("layers.0.attention.k.weight", "norm.weight"):
        found = compare_traces([reference], [traces(Injection(name, 3))], TOLERANCES["float64"])
        assert found.first_departure is not None
        assert found.first_departure.startswith(f"step 3: gradient {name} differs by")


def test_tensors_are_kept_only_where_asked():
    run = tiny_run("--train-iters 4 --num-layers 1")
    traces = list(record_steps(run, ParallelMesh.single(), keep_tensors=lambda number: number == 4))
    assert [bool(trace.shards) for trace in traces] == [False, False, False, True]
    found = compare_traces([traces], [traces], TOLERANCES["float32"])
    assert found.agrees and [len(s.worst) for s in found.steps] == [0, 0, 0, 2]
