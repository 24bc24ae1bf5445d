"""The losses and metrics of an objective in one step: their sums or maxima over micro-batches, and where backward begins.

B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from petatron.base.errors import TrainError
from petatron.models.batch import Batch
from petatron.models.objective import Objective
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec, StageOutput


def valid_count(spec: LossSpec | MetricSpec, batch: Batch) -> Tensor:
    """Returns the number of tokens of a batch, or of samples, that a loss or a metric is the mean of: this rank's share of them.

    A maximum has none, and is divided by 1.
    """
    if is_maximum(spec):
        return torch.zeros((), dtype=torch.float64, device=next(iter(batch.arrays.values())).device)
    if spec.per == "token" and spec.mask is not None:
        return batch[spec.mask].sum(dtype=torch.float64)
    if spec.mask is not None and batch.has_first_part:
        return batch[spec.mask].sum(dtype=torch.float64)
    count = float(batch.num_samples) if batch.has_first_part else 0.0
    return torch.full((), count, dtype=torch.float64, device=next(iter(batch.arrays.values())).device)


def is_maximum(spec: LossSpec | MetricSpec) -> bool:
    return isinstance(spec, MetricSpec) and spec.reduction == "max"


def maxima_of(objective: Objective) -> list[int]:
    """Returns the places of maxima among losses and metrics."""
    return [place for place, spec in enumerate((*objective.losses, *objective.metric_specs)) if is_maximum(spec)]


def add_totals(totals: Tensor, others: Tensor, objective: Objective) -> Tensor:
    """Returns the sums of two batches' totals [losses + metrics], or the larger ones where these are maxima."""
    result = totals + others
    for place in maxima_of(objective):
        result[place] = torch.maximum(totals[place], others[place])
    return result


class ObjectiveTerms:
    """Sums of one step, and maxima. `sums` [losses + metrics] are of this rank, on the device."""

    def __init__(self, objective: Objective, scales: Tensor | None, *, device: torch.device) -> None:
        """`scales` [losses] are the factors on sums before backward; None without gradients."""
        self._objective = objective
        specs = (*objective.losses, *objective.metric_specs)
        self.sums = torch.zeros(len(specs), dtype=torch.float64, device=device)
        for place in maxima_of(objective):
            self.sums[place].fill_(-torch.inf)
        self._sum_by_name = {spec.name: (spec, self.sums[index]) for index, spec in enumerate(specs)}
        self._scales = None if scales is None else tuple(zip(objective.losses, scales))

    @property
    def outputs(self) -> tuple[str, ...]:
        """What stages are asked for, instead of the model's own losses."""
        return self._objective.outputs

    def known_gradients(self, batch: Batch) -> dict[str, Tensor] | None:
        """Returns the gradients of the losses, by name and as the model returns them; None without gradients."""
        if self._scales is None:
            return None
        return {loss.name: _gradient(loss, batch, scale) for loss, scale in self._scales}

    def add(
        self, output: StageOutput, batch: Batch, gradients: Mapping[str, Tensor] | None, *, stage: int
    ) -> list[GradientEdge]:
        """Adds the losses and metrics of what a stage returned, if it computes any; returns where its backward begins."""
        losses = output.losses if self._objective.uses_model_losses else self._objective_losses(output, batch)
        edges: list[GradientEdge] = []
        for name, values in losses.items():
            if name not in self._sum_by_name:
                declared = ", ".join(loss.name for loss in self._objective.losses)
                raise TrainError(f"Stage {stage} returns the loss {name!r}, and the model declares: {declared}.")
            spec, total = self._sum_by_name[name]
            assert isinstance(spec, LossSpec)
            total += _sum(values.detach(), spec, batch)
            if gradients is not None and values.requires_grad:
                edges.append(get_gradient_edge((values * gradients[name]).sum()))
        measures = self._scales is None or self._objective.measures_training
        if measures and self._objective.metric_specs and self._objective.losses[0].name in losses:
            self._add_metrics(losses if self._objective.uses_model_losses else None, output, batch)
        return edges

    def _objective_losses(self, output: StageOutput, batch: Batch) -> dict[str, Tensor]:
        """Returns what an objective computes of the outputs of the stage that has them; of other stages nothing."""
        if not all(name in output.collected for name in self.outputs):
            return {}
        losses = self._objective.loss(_wide(output.collected), batch)
        self._check("loss", losses, self._objective.losses, batch)
        has_gradients = self._scales is not None and any(x.requires_grad for x in output.collected.values())
        without = [name for name, x in losses.items() if not x.requires_grad]
        if has_gradients and without:
            raise TrainError(
                f"{type(self._objective).__name__}.loss returns {', '.join(without)} without gradients, so that it would train nothing. "
                "Compute it from `outputs` by differentiable operations, without `detach`, `.item()` or `torch.no_grad()`; what is only "
                "reported belongs into `metrics`, and a loss that has no terms in a batch is `0 * outputs[...].sum()`."
            )
        per_token = {loss.name for loss in self._objective.losses if loss.per == "token"}
        return {name: x.transpose(0, 1) if name in per_token else x for name, x in losses.items()}

    @torch.no_grad()
    def _add_metrics(self, model_losses: Mapping[str, Tensor] | None, output: StageOutput, batch: Batch) -> None:
        outputs = _wide(output.collected)
        if model_losses is not None:
            outputs |= {name: x.transpose(0, 1) for name, x in model_losses.items()}
        outputs = {name: x.detach() for name, x in outputs.items()}
        metrics = self._objective.metrics(outputs, batch)
        self._check("metric", metrics, self._objective.metric_specs, batch)
        for spec in self._objective.metric_specs:
            values, total = metrics[spec.name], self._sum_by_name[spec.name][1]
            if is_maximum(spec):
                total.copy_(torch.maximum(total, _max(values, spec, batch)))
            else:
                total.add_(_sum(values.t() if spec.per == "token" else values, spec, batch))

    def _check(
        self,
        what: Literal["loss", "metric"],
        values: Mapping[str, Tensor],
        specs: tuple[LossSpec | MetricSpec, ...],
        batch: Batch,
    ) -> None:
        """Checks names and shapes: a loss of another shape would be broadcast against its mask."""
        kind, expected = type(self._objective).__name__, {spec.name: _shape(spec, batch) for spec in specs}
        if set(values) != set(expected):
            names = {"returned": ", ".join(values) or "none", "declared": ", ".join(expected) or "none"}
            raise TrainError(f"{kind}.{what} returns {names['returned']}, and it declares {names['declared']}.")
        for name, shape in expected.items():
            if tuple(values[name].shape) != shape:
                raise TrainError(
                    f"{kind} returns the {what} {name!r} as {list(values[name].shape)}, and one value for each "
                    f"{next(spec.per for spec in specs if spec.name == name)} is {list(shape)}."
                )


def _shape(spec: LossSpec | MetricSpec, batch: Batch) -> tuple[int, ...]:
    return (batch.num_samples,) if spec.per == "sample" or spec.mask is None else tuple(batch[spec.mask].shape)


def _gradient(loss: LossSpec, batch: Batch, scale: Tensor) -> Tensor:
    """Returns the factors on the values of a loss: its mask, times weights of tokens, times the scale."""
    if loss.per != "token":
        scale = scale if batch.has_first_part else torch.zeros_like(scale)
        return scale if loss.mask is None else batch[loss.mask].double() * scale
    assert loss.mask is not None
    factors = batch[loss.mask].t().double() * scale
    weights = None if loss.token_weights is None else batch.arrays.get(loss.token_weights)
    return factors if weights is None else factors * weights.t()


def _sum(values: Tensor, spec: LossSpec | MetricSpec, batch: Batch) -> Tensor:
    """Sums the valid values, [S, B] per token; of values per sample, which all parts of a sequence have, the first part's alone."""
    if spec.per == "token":
        assert spec.mask is not None
        masked = values * batch[spec.mask].t()
        weights = batch.arrays.get(spec.token_weights) if isinstance(spec, LossSpec) and spec.token_weights else None
        return (masked if weights is None else masked * weights.t()).sum()
    masked = values if spec.mask is None else values * batch[spec.mask]
    return masked.sum() if batch.has_first_part else torch.zeros_like(masked).sum()


def _max(values: Tensor, spec: MetricSpec, batch: Batch) -> Tensor:
    """Returns the largest of the valid values; -inf if there are none."""
    valid = values if spec.mask is None else values.masked_fill(batch[spec.mask] == 0, -torch.inf)
    return valid.amax().to(torch.float64)


def _wide(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in outputs.items()}
