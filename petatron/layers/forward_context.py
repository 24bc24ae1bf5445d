"""The forward context: what every layer receives besides the activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from petatron.kernels.attention.document_layout import Documents, KeySpans
from petatron.layers.rope import RopeSpec
from petatron.layers.spec.generation_state import GenerationStep
from petatron.layers.token_rows import TokenRows

RopeCosSin = tuple[Tensor, Tensor]
LayerLoss = tuple[str, int]
"""The name of a loss that a layer computes of itself, and the index of the layer."""
StatisticsKey = int | LayerLoss


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Describes one forward pass of one micro-batch.

    rope_cos_sin: rope's cos and sin of this rank's positions, for each rope of the layers.
    documents: document boundaries of the *whole* sequence, on every context-parallel rank, which attention must not cross;
        None when a row is one document.
    key_spans: the keys of another sequence that each token of the *whole* sequence sees, for cross-attention; None: all.
    aux_loss_scale: the factor on a layer's own loss (load balancing, z-loss) before its gradient is added; None without gradients.
    tensors: tensors that several layers read, by name, such as an encoder's output.
    router_statistics: one vector per layer index, summed over micro-batches and ranks later. Recompute in backward writes
        the same values again. Losses of layers other than routers have a name and the layer index as key (`LayerLoss`).
    generation: the generation step that this pass runs, with the pages and states of layers; None: whole sequences. Activations of a
        step are rows [T, D], the packed tokens of all sequences, instead of [S, B, D].
    positions: of this rank's tokens, [S] or [B, S]; None if no layer needs them.
    token_rows: how activations are flattened to rows [R, D], if they are: between layers that all take rows (`BranchModule.takes_rows`).
    """

    rope_cos_sin: Mapping[RopeSpec, RopeCosSin] = field(default_factory=dict)
    documents: Documents | None = None
    aux_loss_scale: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    router_statistics: dict[StatisticsKey, Tensor] = field(default_factory=dict)
    generation: GenerationStep | None = None
    positions: Tensor | None = None
    token_rows: TokenRows | None = None
    key_spans: KeySpans | None = None

    def token_positions(self) -> Tensor:
        assert self.positions is not None, "a model with layers that need positions passes them"
        return self.positions
