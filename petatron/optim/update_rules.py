"""Update rules: the step of an optimizer, given its scalars on the device.

What a rule declares of itself is elsewhere (`UpdateRuleSpec`); here is how it updates weights. There are three kinds, one for each unit:
an `ElementRule` is called for every segment of elements, a `TensorRule` for every logical tensor (`update_by_tensor_sums.py`), a
`MatrixRule` for every logical matrix (`matrix_update.py`). A rule stores no state per element or matrix: it is passed in by the
optimizer, which allocates it as declared. Whether a step is skipped is a scalar on the device, so that no step synchronizes with the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from petatron.config.schema.optimizers.adam import AdamSpec
from petatron.config.schema.optimizers.sgd import SgdSpec
from petatron.kernels.optimizer import adam
from petatron.kernels.optimizer.adam import AdamKernel, AdamRates, AdamState, SquaresKernel, adam_scalars
from petatron.kernels.registry import KernelChoice
from petatron.sharding.optimizer_group_spec import GroupSpec

_SGD_CHUNK = 1 << 24  # elements whose scaled gradient exists at a time


@dataclass(frozen=True, slots=True)
class OptimizerKernels:
    """The implementations that an optimizer works with."""

    adamw: AdamKernel = adam.adamw_fused
    sum_of_squares: SquaresKernel = adam.sum_of_squares

    @classmethod
    def from_choice(cls, choice: KernelChoice) -> OptimizerKernels:
        """Those of the registry's choice for `adamw`."""
        return cls(choice.functions.adamw, choice.functions.sum_of_squares)


TORCH_KERNELS = OptimizerKernels()
"""torch's own: for every device and precision."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule is built with besides its declaration."""

    device: torch.device
    kernels: OptimizerKernels = TORCH_KERNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """Consecutive elements to update, flat and on one device.

    moments: in the order of the rule's state. model_weight: the model's own in its precision, None where that is the master.
    start: their offset in the flat shard they belong to.
    """

    grad: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    model_weight: Tensor | None
    start: int

    def slice_range(self, bounds: tuple[int, int]) -> ParamSlice:
        """Returns the elements from the first of `bounds` to the second."""
        part, weight = slice(*bounds), self.model_weight
        return ParamSlice(
            grad=self.grad[part],
            master=self.master[part],
            moments=tuple(moment[part] for moment in self.moments),
            model_weight=None if weight is None else weight[part],
            start=self.start + bounds[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """The scalars of one step, the same for all elements; `grad_factor` and `skipped` are on the device.

    grad_factor: what gradients are multiplied by. skipped: 1.0 leaves everything as it is.
    """

    grad_factor: Tensor
    skipped: Tensor
    lr: float
    decoupled_lr: float
    weight_decay: float

    def of_group(self, spec: GroupSpec) -> StepScalars:
        """Returns the step of one group, whose multipliers are in its learning rate and weight decay."""
        lr = self.decoupled_lr if spec.decoupled_lr else self.lr
        return replace(self, lr=lr * spec.lr_scale, weight_decay=self.weight_decay * spec.weight_decay)

    def kept(self, dtype: torch.dtype) -> Tensor:
        """Returns 1 on the device for a step that is taken, and 0 for one that is skipped."""
        return 1.0 - self.skipped.to(dtype)

    def scaled_grad(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a gradient unscaled and clipped; zero in a step that is skipped."""
        return torch.where(self.skipped.bool(), 0.0, grad.to(dtype) * self.grad_factor.to(dtype))


UpdateFunction = Callable[[ParamSlice, GroupSpec], None]
"""Updates some elements of a group."""


class UpdateRule(Protocol):
    """The state of a rule that is not a tensor: how many updates it has applied."""

    def scalar_state(self) -> dict[str, float]: ...

    def load_scalar_state(self, state: Mapping[str, float]) -> None: ...


class ElementRule(UpdateRule, Protocol):
    """A rule with the unit `element`."""

    def start_step(self, step: StepScalars) -> UpdateFunction: ...


@dataclass(frozen=True, slots=True)
class MatrixBatch:
    """Whole matrices of one shape [N, rows, columns], as this rank has them while it updates them.

    inputs: what `MatrixRule.directions` returned for their elements. state: that of the matrices as declared, [N, ...], updated in
    place. kept: 1 where a matrix is updated, and 0 where it stays as it is, with its state; [N, 1, 1].
    """

    inputs: tuple[Tensor, ...]
    state: Mapping[str, Tensor]
    kept: Tensor


class MatrixRule(UpdateRule, Protocol):
    """A rule with the unit `matrix`: the parts of a step on elements, before and after, and on whole matrices between.

    num_inputs: how many values of each element the whole matrix is computed from.
    """

    num_inputs: int

    def start_step(self, step: StepScalars) -> None: ...

    def exchange_dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which matrices are exchanged and computed with."""
        ...

    def directions(self, grad: Tensor, moments: Sequence[Tensor], step: StepScalars) -> Sequence[Tensor]:
        """Updates the moments of some elements in place, and returns what their matrix is computed from."""
        ...

    def transform(self, matrices: MatrixBatch) -> Tensor:
        """Returns the updates of whole matrices, [N, rows, columns]."""
        ...

    def apply(self, master: Tensor, update: Tensor, step: StepScalars, *, shape: tuple[int, int]) -> None:
        """Applies weight decay and an update to master weights, in place; `shape` is that of their matrix."""


@dataclass(frozen=True, slots=True)
class TensorElements:
    """Some elements of a logical tensor, as a box of its dimensions, with their state.

    moments: the state with a value for each element. row, column: the state of rows and columns, if there is any, with a dimension of
    size 1 in place of the other; mean: that of the rows' state over all rows of the matrix.
    """

    grad: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    row: Tensor | None = None
    column: Tensor | None = None
    mean: Tensor | None = None


class TensorRule(UpdateRule, Protocol):
    """A rule with the unit `tensor`: elements stay on the ranks that own them, and sums over a tensor are reduced."""

    def start_step(self, step: StepScalars) -> None: ...

    def measure(self, grad: Tensor, step: StepScalars) -> Tensor:
        """Returns the values of elements whose means over rows and columns `update_means` receives."""
        ...

    def update_means(self, state: Tensor, means: Tensor, step: StepScalars) -> None:
        """Updates the state of all rows and columns of many tensors, in place."""

    def update_moments(self, elements: TensorElements, step: StepScalars) -> None:
        """Updates the state of elements in place, before directions are asked for."""

    def direction(self, elements: TensorElements, step: StepScalars) -> Tensor:
        """Returns the update of elements before it is scaled by what all elements of the tensor have in common."""
        ...

    def apply(
        self, elements: TensorElements, direction: Tensor, rms: Tensor, weight_rms: Tensor, step: StepScalars
    ) -> None:
        """Updates master weights in place; `rms` and `weight_rms` are root mean squares of the tensor's direction and weights."""


class CountedRule:
    """A rule that counts its updates, on the device, since only the device knows which were skipped."""

    def __init__(self, context: RuleContext, *, dtype: torch.dtype = torch.float32) -> None:
        self._num_updates = torch.zeros((), dtype=dtype, device=context.device)

    def count_update(self, step: StepScalars) -> None:
        self._num_updates += 1.0 - step.skipped

    def scalar_state(self) -> dict[str, float]:
        return {"updates": float(self._num_updates)}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        self._num_updates.fill_(state["updates"])


class AdamRule(CountedRule):
    """AdamW."""

    def __init__(self, spec: AdamSpec, context: RuleContext) -> None:
        super().__init__(context)
        self._settings, self._kernel = spec.settings, context.kernels.adamw

    def start_step(self, step: StepScalars) -> UpdateFunction:
        self.count_update(step)
        settings = self._settings
        betas = {"beta1": settings.adam_beta1, "beta2": settings.adam_beta2}
        scalars = adam_scalars(self._num_updates, step.grad_factor, step.skipped, **betas)

        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            group = step.of_group(spec)
            eps = settings.adam_eps * spec.eps_scale
            rates = AdamRates(lr=group.lr, weight_decay=group.weight_decay, eps=eps, **betas)
            state = AdamState(elements.master, *elements.moments, weight=elements.model_weight)
            self._kernel(elements.grad, state, scalars, rates=rates, start=elements.start)

        return update


class UncountedRule:
    """A rule whose step does not depend on how many there were."""

    def scalar_state(self) -> dict[str, float]:
        return {}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        """Does nothing: no updates are counted."""


class SgdRule(UncountedRule):
    """SGD by torch's fused kernel, with momentum where there is any.

    With g the gradient times the factor that unscales and clips, plus decay w: b = momentum b + g, w = w - lr b. Weight decay is part of
    the gradient, as is usual for SGD.
    """

    def __init__(self, spec: SgdSpec, context: RuleContext) -> None:
        self._momentum = spec.settings.sgd_momentum

    def start_step(self, step: StepScalars) -> UpdateFunction:
        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            group, dtype = step.of_group(spec), elements.master.dtype
            for begin in range(0, elements.grad.numel(), _SGD_CHUNK):
                part = elements.slice_range((begin, begin + _SGD_CHUNK))
                torch._fused_sgd_(
                    [part.master],
                    [part.grad.to(dtype) * step.grad_factor.to(dtype)],
                    list(part.moments),
                    weight_decay=group.weight_decay,
                    momentum=self._momentum if part.moments else 0.0,
                    lr=group.lr,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                    grad_scale=None,
                    found_inf=step.skipped,
                )
                if part.model_weight is not None:
                    part.model_weight.copy_(part.master)

        return update
