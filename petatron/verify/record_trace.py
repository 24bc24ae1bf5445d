"""Records the losses, gradients and weights of a run by logical tensor, so that two layouts can be compared.

Each rank records its own shards; together they are the whole logical tensors, whatever the layout. No communication is added to
the recorded run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.lr_schedule import LearningRateSchedule, WeightDecaySchedule
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards
from petatron.train.build_run import build_loader, build_model, build_optimizer


@dataclass(frozen=True, slots=True)
class TracedShard:
    """A shard of one logical tensor at one step; `kind` is gradient (after reduction) or parameter (after the update)."""

    kind: str
    name: str
    logical_shape: tuple[int, ...]
    start: tuple[int, ...]
    values: Tensor

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.values.shape))


@dataclass(slots=True)
class StepTrace:
    """One step on one rank."""

    loss: float
    grad_norm: float
    shards: list[TracedShard] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Injection:
    """A deliberate fault for testing the comparison: corrupts one logical tensor's gradient at one step (from 1)."""

    name: str
    step: int

    def apply(self, model: ParallelModel) -> None:
        """Corrupts the gradient on every rank that holds the tensor."""
        for group in _traced_groups(model, "gradient"):
            for shard, view in group_tensor_shards(group, group.grads()):
                if shard.name == self.name:
                    view.mul_(1.01).add_(1e-3)


def record_steps(
    run: RunConfig,
    mesh: ParallelMesh,
    *,
    keep_tensors: Callable[[int], bool] = lambda step: True,
    injection: Injection | None = None,
) -> Iterator[StepTrace]:
    """Trains the run and yields each step; `keep_tensors` selects the steps (from 1) with tensors, not only the loss."""
    model = build_model(run, mesh)
    optimizer = build_optimizer(run, model)
    rates, decays = LearningRateSchedule.from_config(run), WeightDecaySchedule.from_config(run)
    decoupled = LearningRateSchedule.decoupled_from_config(run)
    samples = 0
    for step, batches in enumerate(build_loader(run, mesh), start=1):
        loss = model.train_step(batches)
        if injection is not None and injection.step == step:
            injection.apply(model)
        parts = list(_traced_shards(model, "gradient")) if keep_tensors(step) else []
        progress = (step - 1, samples)
        result = optimizer.step(
            lr=rates.at(*progress),
            decoupled_lr=None if decoupled is None else decoupled.at(*progress),
            weight_decay=decays.at(*progress),
        )
        parts += list(_traced_shards(model, "parameter")) if keep_tensors(step) else []
        samples += sum(batch.num_samples for batch in batches) * mesh.dp.size
        yield StepTrace(float(loss), float(result.grad_norm), parts)


def _traced_groups(model: ParallelModel, kind: str) -> Iterator[ParameterGroup]:
    """Yields the groups that have tensors of a kind: frozen parameters have no gradients."""
    return (group for group in model.param_groups if kind != "gradient" or group.spec.trainable)


def _traced_shards(model: ParallelModel, kind: str) -> Iterator[TracedShard]:
    """Yields every shard this rank updates, replicas too: ranks that should hold the same may have diverged."""
    for group in _traced_groups(model, kind):
        for shard, view in group_tensor_shards(group, group.grads() if kind == "gradient" else group.weights()):
            values = view.detach().to("cpu", copy=True).contiguous()
            yield TracedShard(kind, shard.name, shard.logical_shape, shard.start, values)


def assemble_tensors(shards: Iterable[TracedShard]) -> dict[tuple[str, str], Tensor]:
    """Assembles whole logical tensors from the shards of all ranks; elements that no rank supplied are NaN."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for part in shards:
        key = (part.kind, part.name)
        if key not in tensors:
            tensors[key] = torch.full(part.logical_shape, float("nan"), dtype=torch.float64)
        tensors[key][part.slices()] = part.values.to(torch.float64)
    return tensors


def write_trace(steps: Iterable[StepTrace], folder: Path) -> None:
    """Writes all steps of one rank into a folder, which `StoredTrace` reads: a safetensors file for each."""
    folder.mkdir(parents=True)
    for number, step in enumerate(steps, start=1):
        tensors = {str(index): part.values for index, part in enumerate(step.shards)}
        parts = [[part.kind, part.name, part.logical_shape, part.start] for part in step.shards]
        record = {"loss": step.loss, "grad_norm": step.grad_norm, "parts": parts}
        save_file(tensors, folder / f"step-{number:06d}.safetensors", metadata={"trace": json.dumps(record)})


class StoredTrace(Sequence[StepTrace]):
    """The steps a rank wrote into a folder, read one at a time: a trace may be larger than memory."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("step-*.safetensors"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> StepTrace:  # pyright: ignore[reportIncompatibleMethodOverride]
        with safe_open(self._files[index], framework="pt") as file:
            record = json.loads(file.metadata()["trace"])
            parts = [
                TracedShard(kind, name, tuple(shape), tuple(start), file.get_tensor(str(number)))
                for number, (kind, name, shape, start) in enumerate(record["parts"])
            ]
        return StepTrace(record["loss"], record["grad_norm"], parts)
