"""Checks that two layouts train the same model: compares their traces and names the first tensor that diverges.

The difference of two losses is relative to the reference. The difference of two tensors is the norm of their difference
relative to the norm of the reference, where a tensor counts as at least a thousandth of its fair share of the norm of all
tensors of its kind: some gradients (the bias of keys, which shifts all scores alike) are zero in exact arithmetic, and
noise over noise is meaningless. For the same reason the *parameter* of such a gradient is skipped until its gradient
has once been more than noise: Adam divides a gradient by the size of past ones, so noise becomes a step of full size, in
whatever direction that layout rounds. Its gradient is always compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from petatron.verify.record_trace import StepTrace, TracedShard, assemble_tensors

_NORM_FLOOR = 1e-3
_NOISE_FLOOR = 1e-5


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest relative differences that count as equal."""

    loss: float
    gradient: float
    parameter: float


TOLERANCES = {
    "float32": Tolerances(loss=1e-5, gradient=1e-3, parameter=1e-3),
    "float64": Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-7),
}
"""Tolerances of each precision, over some tens of steps."""


@dataclass(frozen=True, slots=True)
class WorstTensor:
    """The tensor of one kind that differs most at a step."""

    kind: str
    name: str
    difference: float


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step of the reference and of the candidate."""

    step: int
    reference_loss: float
    candidate_loss: float
    loss_difference: float
    norm_difference: float
    worst: tuple[WorstTensor, ...]


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """All steps, and what diverged first (None when nothing did)."""

    steps: tuple[StepComparison, ...]
    first_departure: str | None

    @property
    def agrees(self) -> bool:
        return self.first_departure is None

    @property
    def largest_loss_difference(self) -> float:
        return max((step.loss_difference for step in self.steps), default=math.inf)


def compare_traces(
    reference: Sequence[Sequence[StepTrace]], candidate: Sequence[Sequence[StepTrace]], tolerances: Tolerances
) -> TraceComparison:
    """Compares two runs, each given as one list of steps per rank."""
    if len(reference[0]) != len(candidate[0]):
        return TraceComparison((), f"the reference made {len(reference[0])} steps, the layout {len(candidate[0])}")
    steps, first = [], None
    moved: set[str] = set()
    for number in range(1, len(reference[0]) + 1):
        step = _compare_step(number, [r[number - 1] for r in reference], [c[number - 1] for c in candidate], moved)
        steps.append(step)
        first = first or _first_mismatch(step, tolerances)
    return TraceComparison(tuple(steps), first)


def _compare_step(
    number: int, reference: Sequence[StepTrace], candidate: Sequence[StepTrace], significant_names: set[str]
) -> StepComparison:
    """`significant_names` collects the tensors whose gradient has been more than noise so far."""
    ours, norm = reference[0].loss, reference[0].grad_norm
    losses = [(_relative_difference(abs(ours - trace.loss), abs(ours)), trace.loss) for trace in candidate]
    loss_difference, theirs = max(losses, key=lambda pair: pair[0])
    left = assemble_tensors(part for rank in reference for part in rank.shards)
    right = assemble_tensors(part for rank in candidate for part in rank.shards)
    gradients = _of_kind(left, "gradient"), _of_kind(right, "gradient")
    shares = _expected_norms(gradients[0])
    significant_names |= {name for name, x in gradients[0].items() if float(x.norm()) > _NOISE_FLOOR * shares[name]}
    parameters = _of_kind(left, "parameter", significant_names), _of_kind(right, "parameter", significant_names)
    worst = []
    for kind, (a, b) in (("gradient", gradients), ("parameter", parameters)):
        held = [part for rank in candidate for part in rank.shards if part.kind == kind and part.name in a]
        differences = _differences(a, b, held)
        if differences:
            name = max(differences, key=lambda key: differences[key])
            worst.append(WorstTensor(kind, name, differences[name]))
    norms = max(_relative_difference(abs(norm - trace.grad_norm), abs(norm)) for trace in candidate)
    return StepComparison(number, ours, theirs, loss_difference, norms, tuple(worst))


def _of_kind(tensors: dict[tuple[str, str], Tensor], kind: str, names: set[str] | None = None) -> dict[str, Tensor]:
    return {name: x for (k, name), x in tensors.items() if k == kind and (names is None or name in names)}


def _expected_norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Returns the norm each tensor would have if all elements had one magnitude; a non-finite one does not affect the others'."""
    squares = [float(x.square().sum()) for x in tensors.values()]
    total = math.sqrt(sum(square for square in squares if math.isfinite(square)))
    elements = sum(x.numel() for x in tensors.values())
    return {name: total * math.sqrt(x.numel() / elements) for name, x in tensors.items()}


def _differences(
    left: dict[str, Tensor], right: dict[str, Tensor], replica_shards: Sequence[TracedShard]
) -> dict[str, float]:
    """Returns by name the difference of the whole tensors, or of one rank's shard (`replica_shards`) where replicas differ more."""
    shares = _expected_norms(left)
    scales = {name: max(float(x.norm()), _NORM_FLOOR * shares[name]) for name, x in left.items()}
    out = {}
    for name in dict.fromkeys([*left, *right]):  # a fixed order, so that ties always name the same one
        if name not in left or name not in right or left[name].shape != right[name].shape:
            out[name] = math.inf
        else:
            out[name] = _relative_difference(float((left[name] - right[name]).norm()), scales[name])
    for part in replica_shards:
        if left[part.name].shape == part.logical_shape:
            difference = float((left[part.name][part.slices()] - part.values).norm())
            out[part.name] = max(out[part.name], _relative_difference(difference, scales[part.name]))
    return out


def _relative_difference(difference: float, scale: float) -> float:
    """A non-finite value on either side is an infinite difference, so that it never passes a tolerance."""
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    return difference / scale if scale > 0.0 else (0.0 if difference == 0.0 else math.inf)


def _first_mismatch(step: StepComparison, tolerances: Tolerances) -> str | None:
    """Checks the loss, then each gradient, then their norm (which clipping uses), then the updated parameters."""
    by_kind = {worst.kind: (f"{worst.kind} {worst.name}", worst.difference) for worst in step.worst}
    checks = [("loss", step.loss_difference, tolerances.loss)]
    checks += [(*by_kind["gradient"], tolerances.gradient)] if "gradient" in by_kind else []
    checks += [("gradient norm", step.norm_difference, tolerances.gradient)]
    checks += [(*by_kind["parameter"], tolerances.parameter)] if "parameter" in by_kind else []
    for what, difference, bound in checks:
        if difference > bound:
            return f"step {step.step}: {what} differs by {difference:.1e} (bound {bound:.0e})"
    return None
