"""One decoder for the GPT and LLaMA families, or one pipeline stage of it. S sequence, B batch, D hidden."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.layers.dropout import Dropout
from petatron.layers.embedding import PositionEmbedding, TokenEmbedding
from petatron.layers.forward_context import ForwardContext
from petatron.layers.output_head import OutputHead
from petatron.layers.rope import RotaryEmbedding
from petatron.models.batch import Batch
from petatron.models.stage_module import StageModule, run_layers_sequentially

if TYPE_CHECKING:
    from petatron.models.decoder_spec import DecoderSpec


class Decoder(StageModule):
    """Embedding, layers, final norm, output head; or one pipeline stage of that: some layers, and the ends it has."""

    def __init__(self, spec: DecoderSpec, stage: PipelineStage) -> None:
        super().__init__()
        config = self.config = spec.config
        self.stage = stage
        learned = spec.has_position_table and stage.has_embedding
        self.embedding = TokenEmbedding(spec.vocab_size, config.hidden_size) if stage.has_embedding else None
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self._rotary_embeddings = [RotaryEmbedding(rope) for rope in spec.ropes]  # no parameters
        self.layers = nn.ModuleDict({str(index): spec.layers[index].build(index) for index in stage.layer_indices})
        self.run_layers = run_layers_sequentially
        self.norm = spec.final_norm.build() if stage.has_loss else None
        # A tied head uses the embedding's weight if it is on the same stage, and else has a replica of it.
        tied = bool(spec.tied_params) and self.embedding is not None
        self.head = OutputHead(spec.vocab_size, config.hidden_size, tied=tied) if stage.has_loss else None

    def input_modules(self) -> Sequence[nn.Module]:
        return [module for module in (self.embedding, self.position) if module is not None]

    def output_modules(self) -> Sequence[nn.Module]:
        return [module for module in (self.norm, self.head) if module is not None]

    def reused_params(self) -> Iterator[nn.Parameter]:
        if self.head is not None and self.head.weight is None and self.embedding is not None:
            yield self.embedding.weight

    def forward(
        self,
        batch: Batch,
        x_SBD: Tensor | None = None,
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[int, Tensor] | None = None,
        loss_weights_SB: Tensor | None = None,
    ) -> Tensor:
        """Returns token losses [S, B] from the last stage, else the next stage's input; `x_SBD` is this stage's input.

        `aux_loss_scale` and `router_statistics` are those of `ForwardContext`. `loss_weights_SB` are the gradients of the token
        losses, where they are known beforehand: that saves a GEMM.
        """
        x_SBD = self._run_stage(batch, x_SBD, aux_loss_scale, {} if router_statistics is None else router_statistics)
        if self.head is None or self.norm is None:
            return x_SBD
        return self.head.losses(
            self.norm(x_SBD), self._embedding_weight(), batch.labels.t(), loss_weights_SB=loss_weights_SB
        )

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary], whole on every rank; needs embedding and head on one stage."""
        assert self.embedding is not None and self.head is not None and self.norm is not None
        x_SBD = self._run_stage(Batch(tokens_BS, tokens_BS, tokens_BS, positions), None, None, {})
        return self.head.vocab_shard.full_logits(self.head(self.norm(x_SBD), self._embedding_weight())).transpose(0, 1)

    def _embedding_weight(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.weight

    def _run_stage(
        self, batch: Batch, x_SBD: Tensor | None, aux_loss_scale: Tensor | None, router_statistics: dict[int, Tensor]
    ) -> Tensor:
        """Returns the activations after the last layer."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        if self.embedding is not None:
            x_SBD = self._embed(batch.tokens, positions)
        assert x_SBD is not None, "a stage without the embedding takes the activations of the stage before"
        rope_cos_sin = {rotary.spec: rotary(positions, x_SBD.dtype) for rotary in self._rotary_embeddings}
        context = ForwardContext(rope_cos_sin, batch.documents, aux_loss_scale, router_statistics=router_statistics)
        return self.run_layers(list(self.layers.values()), x_SBD, context)

    def _embed(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        x_SBD = self.embedding(tokens_BS)
        if self.config.scale_embeddings:
            x_SBD = x_SBD * x_SBD.new_full((), math.sqrt(self.config.hidden_size))
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        return self.embedding_dropout(x_SBD)
