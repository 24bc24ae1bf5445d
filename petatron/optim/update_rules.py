"""Update rules: the update of some elements, given the step's scalars on the device.

A rule is called once per step (`start_step`) and then for every segment of elements. It has no state per element: moments are
passed in by the optimizer, which stores them on the device, in host memory or on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from petatron.config.schema.training import OptimizerConfig
from petatron.kernels.optimizer.adam import AdamKernel, AdamRates, AdamState, adam_scalars
from petatron.kernels.optimizer.sgd import SgdRates, sgd
from petatron.sharding.group_spec import GroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """Consecutive elements to update, flat and on one device.

    moments: in the order of the rule's kinds. model_weight: the model's own in its precision, None where that is the master.
    start: their offset in the flat shard they belong to.
    """

    grad: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    model_weight: Tensor | None
    start: int

    def slice_range(self, bounds: tuple[int, int]) -> ParamSlice:
        """Returns the elements from the first of `bounds` to the second."""
        part = slice(*bounds)
        return ParamSlice(
            grad=self.grad[part],
            master=self.master[part],
            moments=tuple(moment[part] for moment in self.moments),
            model_weight=None if self.model_weight is None else self.model_weight[part],
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


UpdateFunction = Callable[[ParamSlice, GroupSpec], None]
"""Updates some elements of a group."""


class UpdateRule(Protocol):
    @property
    def moments(self) -> Mapping[str, torch.dtype | None]:
        """Returns the kind and dtype of every moment; None means the dtype of the master weights."""
        ...

    def start_step(self, step: StepScalars) -> UpdateFunction: ...

    def scalar_state(self) -> dict[str, float]:
        """State that is not a tensor of the model's shape."""
        ...

    def load_scalar_state(self, state: Mapping[str, float]) -> None: ...


class AdamRule:
    """AdamW. Updates are counted on the device, since only the device knows which were skipped."""

    def __init__(self, config: OptimizerConfig, kernel: AdamKernel, device: torch.device) -> None:
        self._config = config
        self._kernel = kernel
        self._num_updates = torch.zeros((), dtype=torch.float32, device=device)
        self.moments: Mapping[str, torch.dtype | None] = {
            "exp_avg": _moment_dtype(config.exp_avg_dtype),
            "exp_avg_sq": _moment_dtype(config.exp_avg_sq_dtype),
        }

    def start_step(self, step: StepScalars) -> UpdateFunction:
        config = self._config
        self._num_updates += 1.0 - step.skipped
        beta1, beta2 = config.adam_beta1, config.adam_beta2
        scalars = adam_scalars(self._num_updates, step.grad_factor, step.skipped, beta1=beta1, beta2=beta2)

        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            own = step.of_group(spec)
            rates = AdamRates(
                lr=own.lr,
                weight_decay=own.weight_decay,
                beta1=beta1,
                beta2=beta2,
                eps=config.adam_eps,
            )
            state = AdamState(elements.master, *elements.moments, weight=elements.model_weight)
            self._kernel(elements.grad, state, scalars, rates=rates, start=elements.start)

        return update

    def scalar_state(self) -> dict[str, float]:
        return {"updates": float(self._num_updates)}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        self._num_updates.fill_(state["updates"])


class SgdRule:
    """SGD, with momentum where there is any."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.sgd_momentum
        self.moments: Mapping[str, torch.dtype | None] = {"momentum_buffer": None} if config.sgd_momentum else {}

    def start_step(self, step: StepScalars) -> UpdateFunction:
        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            own = step.of_group(spec)
            sgd(
                elements.grad,
                elements.master,
                elements.moments[0] if elements.moments else None,
                elements.model_weight,
                factor=step.grad_factor,
                skipped=step.skipped,
                rates=SgdRates(lr=own.lr, weight_decay=own.weight_decay, momentum=self._momentum),
            )

        return update

    def scalar_state(self) -> dict[str, float]:
        return {}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        """Does nothing: SGD counts no updates."""


def _moment_dtype(name: str) -> torch.dtype | None:
    return torch.bfloat16 if name == "bf16" else None
