"""The optimizer of a run: fp32 master weights of what this rank updates, clipping, loss unscaling, a skip on the device.

One step, in order: the global gradient norm (of gradients still multiplied by the loss scale); gradients times one factor
that undoes the loss scale and clips; the update rule on the master weights, which the fused kernel leaves out when the
norm is not finite; master weights back into the model's precision, and to the ranks that compute with them. In fp32 and
fp64 the master weights *are* the model's. A rank has one master tensor per stretch it owns (`mesh/stretch.py`), so how
state is sharded is no business of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.config.schema import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.spec import Piece
from petatron.mesh.stretch import ParameterGroup
from petatron.optim.build import build_rule
from petatron.optim.clip import GlobalNorm


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Device scalars of one update: the unscaled gradient norm, and 1.0 where the update was left out."""

    grad_norm: Tensor
    skipped: Tensor


class MasterOptimizer:
    """Updates a model whose parameters live in flat groups.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> optimizer = petatron.build_optimizer(run, model)
    >>> _ = model.train_step(next(petatron.build_loader(run, model.mesh)))
    >>> bool(optimizer.step().grad_norm > 0)
    True
    """

    def __init__(self, config: OptimizerConfig, groups: Sequence[ParameterGroup], mesh: ParallelMesh) -> None:
        self._config = config
        self._groups = groups
        self._norm = GlobalNorm(groups, mesh.world)
        self._stretches = [(group, stretch) for group in groups for stretch in group.stretches]
        self._masters = [
            nn.Parameter(weight.to(torch.promote_types(weight.dtype, torch.float32)), requires_grad=False)
            for weight in self._weights()
        ]
        self._rule = build_rule(config, self._masters, [group.decay for group, _ in self._stretches])
        self._make_state()

    def _weights(self) -> list[Tensor]:
        return [weight for group in self._groups for weight in group.weights()]

    def _grads(self) -> list[Tensor]:
        return [grad for group in self._groups for grad in group.grads()]

    @torch.no_grad()
    def step(
        self, *, lr: float | None = None, weight_decay: float | None = None, loss_scale: float = 1.0
    ) -> UpdateResult:
        """One update from the accumulated gradients; `loss_scale` is what they were multiplied with.

        Without a schedule, the learning rate and the weight decay are the config's.
        """
        lr = self._config.lr if lr is None else lr
        weight_decay = self._config.weight_decay if weight_decay is None else weight_decay
        grads = self._grads()
        norm = self._norm.norm(grads) / loss_scale
        factor = torch.full_like(norm, 1.0 / loss_scale)
        if self._config.clip_grad > 0.0:
            factor = factor * (self._config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        skipped = (~norm.isfinite()).to(torch.float32)
        for master, grad in zip(self._masters, grads, strict=True):
            master.grad = grad.mul_(factor.to(grad.dtype))
        for rule_group in self._rule.param_groups:
            rule_group["lr"] = lr
            rule_group["weight_decay"] = weight_decay if rule_group["decay"] else 0.0
        self._rule.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue] (read by the fused kernels)
        self._rule.step()
        self.write_back()
        return UpdateResult(norm, skipped)

    def write_back(self) -> None:
        """Copy the master weights into the model where it has its own precision, and tell the other ranks."""
        for master, weight in zip(self._masters, self._weights(), strict=True):
            if master.data_ptr() != weight.data_ptr():
                weight.copy_(master)
        for group in self._groups:
            group.publish()

    def zero_grad_elements(self) -> Tensor:
        """How many gradient elements are exactly zero, over the whole model."""
        return self._norm.zeros(self._grads())

    def weight_norm(self) -> Tensor:
        """L2 norm of the master weights of the whole model."""
        return self._norm.norm([master.data for master in self._masters])

    @property
    def weights_apart(self) -> bool:
        """Whether the master weights are memory of their own, in a wider precision than the model's."""
        pairs = zip(self._masters, self._weights(), strict=True)
        return any(master.data_ptr() != weight.data_ptr() for master, weight in pairs if master.numel())

    def weights(self) -> Iterator[tuple[ParameterGroup, Piece, Tensor]]:
        """The master weights by logical tensor; the model's own follow from them."""
        for (group, stretch), master in zip(self._stretches, self._masters, strict=True):
            for piece, view in stretch.pieces(master.data):
                yield group, piece, view

    def moments(self) -> Iterator[tuple[str, ParameterGroup, Piece, Tensor]]:
        """Every (kind, group, piece, view) of the update rule's state, by logical tensor."""
        for (group, stretch), master in zip(self._stretches, self._masters, strict=True):
            for kind, flat in self._rule.state[master].items():
                if flat.shape == master.shape:
                    for piece, view in stretch.pieces(flat):
                        yield kind, group, piece, view

    def facts(self) -> dict[str, float]:
        """State that is not a tensor of the model's shape: how many updates have been applied."""
        steps = [state["step"] for state in self._rule.state.values() if "step" in state]
        return {"updates": float(steps[0])} if steps else {}

    def restore_facts(self, facts: dict[str, float]) -> None:
        for state in self._rule.state.values():
            if "step" in state:
                state["step"].fill_(facts["updates"])

    def _make_state(self) -> None:
        """Zero moments from the start: torch would make them at the first step, too late for a checkpoint to fill them."""
        for master in self._masters:
            state = self._rule.state[master]
            if self._config.optimizer == "adam":
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            elif self._config.sgd_momentum:
                state["momentum_buffer"] = torch.zeros_like(master)
