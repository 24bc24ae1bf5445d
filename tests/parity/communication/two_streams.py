"""A toy model of two streams, written outside the package: an encoder's output that later stages read, two losses, an input
without a gradient, and one that nobody uses. Eight units in as many stages as there are.

S sequence, B batch, D hidden, R source sequence, E encoded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import BoundaryTensor, LossSpec, ModelIO, StageOutput
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.pipeline.weight_grad_queue import WeightGradQueue
from petatron.schedule.pipeline_plan import PipelinePlan

UNITS, VOCAB, S, B, D, R, E = 8, 11, 6, 2, 5, 4, 3
MIDDLE, BLIND = 4, 3
"""The unit with a loss of its own, and the one that does not read the encoder's output."""


class Unit(nn.Module):
    """Unit 0 embeds both streams; every unit changes the hidden state, with the encoder's output but for one of them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        generator = torch.Generator().manual_seed(index)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.mix, self.read = weight(D, D), weight(E, D)
        if index == 0:
            self.embedding, self.encoder = weight(VOCAB, D), weight(VOCAB, E)
        if index == MIDDLE:
            self.score = weight(E)
        if index == UNITS - 1:
            self.head = weight(D)

    def forward(self, batch: Batch, taken: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        if self.index == 0:
            given["hidden"] = self.embedding[batch.tokens.t()]
            given["encoded"] = self.encoder[batch["source"].t()].tanh()
            given["gate"] = 1.0 + batch.tokens.t().unsqueeze(-1).float() / VOCAB
            given["unused"] = given["hidden"] * 2.0
        streams = {**taken, **given}
        hidden, encoded = streams["hidden"], streams["encoded"]
        change = hidden @ self.mix
        if self.index != BLIND:
            change = change + encoded.mean(0) @ self.read
        given["hidden"] = hidden + (change * streams["gate"].double()).sin()
        if self.index == MIDDLE:
            losses["source loss"] = (encoded @ self.score).square()
        if self.index == UNITS - 1:
            losses["main loss"] = (given["hidden"] @ self.head).square()
        return given, losses


class ToyStage(nn.Module):
    """Some consecutive units as a stage."""

    def __init__(self, units: range) -> None:
        super().__init__()
        self.units = nn.ModuleDict({str(index): Unit(index) for index in units})

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor],
        *,
        aux_loss_scale: Tensor | None,
        router_statistics: dict[int, Tensor],
        loss_weights: Mapping[str, Tensor] | None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        assert (loss_weights is None) == (not torch.is_grad_enabled())
        given: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        for unit in self.units.values():
            new, found = unit(batch, {**inputs, **given})
            given, losses = given | new, losses | found
        last = str(UNITS - 1) in self.units
        return StageOutput(given, losses, {name: given["hidden"] for name in collect if last})


def toy_io(num_stages: int) -> ModelIO:
    streams = (
        BoundaryTensor("hidden", D),
        BoundaryTensor("encoded", E, like="source"),
        BoundaryTensor("gate", 1, dtype=torch.float32, requires_grad=False),
    )
    first = (*streams, BoundaryTensor("unused", D))
    boundaries = ((), first, *(streams,) * (num_stages - 2))
    losses = (LossSpec("main loss"), LossSpec("source loss", mask="source_mask", weight=0.3))
    return ModelIO(boundaries=boundaries[:num_stages], losses=losses, outputs=("hidden_states",))


def toy_batches(count: int, *, seed: int = 0) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)

    def mask(length: int) -> Tensor:
        return (torch.rand(B, length, generator=draw) > 0.3).double()

    return [
        Batch(
            torch.randint(0, VOCAB, (B, S), generator=draw),
            loss_mask=mask(S),
            arrays={"source": torch.randint(0, VOCAB, (B, R), generator=draw), "source_mask": mask(R)},
        )
        for _ in range(count)
    ]


def on_mesh(modules: Mapping[int, nn.Module], io: ModelIO, plan: PipelinePlan, mesh: ParallelMesh) -> ParallelModel:
    """A model without what reduces, casts or routes; gradients are in `parameter.grad`."""
    idle = SimpleNamespace(
        start_step=lambda *_: None,
        finish_grad_sync=lambda: None,
        new_step=lambda micro_batches: None,
        end_step=lambda: None,
        update=lambda _: None,
    )
    parts = SimpleNamespace(
        placements={},
        param_groups=[],
        gradient_reducer=idle,
        fp8_gemms=idle,
        weight_grad_queue=WeightGradQueue(),
        combined_passes=None,
        batch_invariant=False,
    )
    stand_ins: Any = (parts, plan, idle, mesh, None)
    facts: Any = {"spec": None, "dtype": torch.float64, "sequence_parallel": False}
    stages: Any = modules
    return ParallelModel(stages, *stand_ins, io=io, **facts)


def toy_model(plan: PipelinePlan, mesh: ParallelMesh) -> ParallelModel:
    num_stages = plan.ranks * plan.virtual
    each = UNITS // num_stages
    modules = {
        stage: ToyStage(range(stage * each, (stage + 1) * each))
        for stage in range(num_stages)
        if plan.rank_of(stage) == mesh.pp.rank
    }
    return on_mesh(modules, toy_io(num_stages), plan, mesh)


def gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    found = {name: p.grad for stage in stages.values() for name, p in stage.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def plain_objective(batches: Sequence[Batch]) -> tuple[float, dict[str, float], dict[str, Tensor], list[Tensor]]:
    """The same in plain autograd, all units in one graph: objective, losses by name, gradients, last hidden states."""
    whole = ToyStage(range(UNITS))
    sums = {"main loss": torch.zeros((), dtype=torch.float64), "source loss": torch.zeros((), dtype=torch.float64)}
    hidden = []
    for batch in batches:
        streams: dict[str, Tensor] = {}
        for unit in whole.units.values():
            new, losses = unit(batch, streams)
            streams |= new
            for name, token_losses in losses.items():
                sums[name] = sums[name] + (token_losses * batch[MASKS[name]].t()).sum()
        hidden.append(streams["hidden"].detach())
    means = {name: total / sum(batch[MASKS[name]].sum() for batch in batches) for name, total in sums.items()}
    objective = means["main loss"] + 0.3 * means["source loss"]
    objective.backward()
    named = {name: float(mean.detach()) for name, mean in means.items()}
    return float(objective.detach()), named, gradients({0: whole}), hidden


MASKS = {"main loss": "loss_mask", "source loss": "source_mask"}
