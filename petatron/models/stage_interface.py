"""`StageModule`: the abstract base class of a pipeline stage of any model, which is the interface that parallelism uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from petatron.base.errors import TrainError
from petatron.config.pipeline_stages import PipelineStage
from petatron.layers.forward_context import ForwardContext, StatisticsKey
from petatron.layers.spec.generation_state import GenerationStep
from petatron.layers.token_rows import TokenRows
from petatron.layers.transformer_layer import TransformerLayer
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import StageOutput

LayerRunner = Callable[[Sequence[nn.Module], Tensor, ForwardContext], Tensor]
"""Runs a stage's layers one after the other. Recompute and offload replace it by functions that wrap groups of layers."""


def run_layers_sequentially(layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
    """Runs layers one after the other; activations are rows between them, if all of them take rows."""
    residual, rows = None, None
    # Flattened to rows, a micro-batch without sequences would lose its sequence length.
    if x_SBD.dim() == 3 and x_SBD.numel() and all(getattr(layer, "takes_rows", False) for layer in layers):
        rows = TokenRows.of(x_SBD)
        x_SBD, context = rows.flatten(x_SBD), replace(context, token_rows=rows)
    for layer in layers:
        x_SBD, residual = layer(x_SBD, context, residual)
    x_SBD = x_SBD if residual is None else residual.x_SBD + x_SBD
    return x_SBD if rows is None else rows.unflatten(x_SBD)


class StageModule(nn.Module, ABC):
    """Some consecutive layers of a model, and the modules before and after them that this stage has.

    layers: by their index in the whole model. run_layers: called with all of them, or with consecutive parts of them in turn.
    """

    stage: PipelineStage
    layers: nn.ModuleDict
    run_layers: LayerRunner

    @abstractmethod
    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor],
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[StatisticsKey, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage on a micro-batch and the tensors that it takes.

        `aux_loss_scale` and `router_statistics` are those of `ForwardContext`. `loss_weights` [S, B], by the name of the loss, are
        the gradients of the token losses, known before backward; None without gradients. `collect` names wanted outputs, instead of the
        model's losses.
        """

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary] after each token, whole on every rank, where one stage is the whole model."""
        raise TrainError(f"{type(self).__name__} does not continue text: it has no logits of the next token.")

    def generation_step(
        self, tokens_T: Tensor, positions_T: Tensor, x_SBD: Tensor | None, step: GenerationStep, rows_R: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the stage on the packed tokens of several sequences.

        The first stage takes no activations. The last returns logits [R, vocabulary] after the tokens of some rows, and the final
        hidden states of all [T, hidden], both whole on every tensor-parallel rank; the others return the activations of all.
        """
        raise TrainError(f"{type(self).__name__} does not continue text: it has no logits of the next token.")

    def transformer_layers(self) -> list[TransformerLayer]:
        """Returns the layers in their order."""
        return [layer for layer in self.layers.values() if isinstance(layer, TransformerLayer)]

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        """Returns groups of the modules outside layers (embedding, output head), in the order in which forward calls them."""
        return ()

    def reused_params(self) -> Iterator[nn.Parameter]:
        """Yields a parameter once for each use after its first in a forward pass of this stage (a tied embedding)."""
        return iter(())
