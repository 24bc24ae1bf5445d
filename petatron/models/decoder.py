"""One decoder for the GPT and LLaMA families, or one pipeline stage of it. S sequence, B batch, D hidden."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.layers.dropout import Dropout
from petatron.layers.embedding import PositionEmbedding, TokenEmbedding
from petatron.layers.forward_context import ForwardContext
from petatron.layers.output_head import OutputHead
from petatron.layers.rope import RotaryEmbedding
from petatron.layers.spec.generation_state import GenerationStep
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import StageOutput
from petatron.models.stage_module import StageModule, run_layers_sequentially

if TYPE_CHECKING:
    from petatron.models.decoder_spec import DecoderSpec

HIDDEN = "hidden"
"""The tensor between two stages."""
LM_LOSS = "lm loss"
TOKEN_LOSSES, GREEDY_TARGETS = "token_losses", "greedy_targets"
"""Outputs for evaluation, of a batch with labels."""


class Decoder(StageModule):
    """Embedding, layers, final norm, output head; or one pipeline stage of that: some layers, and the ends it has."""

    def __init__(self, spec: DecoderSpec, stage: PipelineStage) -> None:
        super().__init__()
        config = self.config = spec.config
        self.stage = stage
        learned = spec.has_position_table and stage.has_embedding
        self.embedding = TokenEmbedding(spec.vocab_size, config.hidden_size) if stage.has_embedding else None
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embedding_scale = spec.embedding_scale
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self._rotary_embeddings = [RotaryEmbedding(rope) for rope in spec.ropes]  # no parameters
        self.layers = nn.ModuleDict({str(index): spec.layers[index].build(index) for index in stage.layer_indices})
        self.run_layers = run_layers_sequentially
        self.norm = spec.final_norm.build() if stage.has_loss else None
        # A tied head uses the embedding's weight if it is on the same stage, and else has a replica of it.
        tied = bool(spec.tied_params) and self.embedding is not None
        self.head = None
        if stage.has_loss:
            scale = None if config.logits_scaling == 1.0 else 1.0 / config.logits_scaling
            rules = {"input_scale": scale, "softcap": config.final_logit_softcapping}
            self.head = OutputHead(spec.vocab_size, config.hidden_size, tied=tied, **rules)

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        groups = ([self.embedding], [self.position], [self.norm, self.head])
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

    def reused_params(self) -> Iterator[nn.Parameter]:
        if self.head is not None and self.head.weight is None and self.embedding is not None:
            yield self.embedding.weight

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[int, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage as `StageModule` says. Knowing the loss weights beforehand saves a GEMM.

        The last stage computes the loss if the batch has labels. It can collect "logits" [B, S, vocabulary] and "hidden_states"
        [B, S, hidden], the input of the output head: of this rank's part of the sequence, and else whole on every rank; with
        labels also "token_losses" [B, S] and "greedy_targets" [B, S], whether a label is the most likely id.
        """
        statistics = {} if router_statistics is None else router_statistics
        x_SBD = self._run_stage(batch, inputs.get(HIDDEN), aux_loss_scale, statistics)
        if self.head is None or self.norm is None:
            return StageOutput({HIDDEN: x_SBD}, {}, {})
        x_SBD, losses = self.norm(x_SBD), {}
        compute = {"logits": self._logits, "hidden_states": self._hidden_states}
        collected = {name: compute[name](x_SBD) for name in collect if name in compute}
        if GREEDY_TARGETS in collect:
            losses[LM_LOSS], greedy = self.head.losses_and_greedy(x_SBD, self._embedding_weight(), batch.labels.t())
            collected[GREEDY_TARGETS] = greedy.t()
        elif "labels" in batch or TOKEN_LOSSES in collect:
            weights = None if loss_weights is None else loss_weights[LM_LOSS]
            losses[LM_LOSS] = self.head.losses(
                x_SBD, self._embedding_weight(), batch.labels.t(), loss_weights_SB=weights
            )
        if TOKEN_LOSSES in collect:
            collected[TOKEN_LOSSES] = losses[LM_LOSS].t()
        return StageOutput({}, losses, collected)

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary], whole on every rank; needs embedding and head on one stage."""
        assert self.embedding is not None and self.head is not None and self.norm is not None
        return self._logits(self.norm(self._run_stage(Batch(tokens_BS, positions=positions), None, None, {})))

    def generation_step(
        self, tokens_T: Tensor, positions_T: Tensor, x_SBD: Tensor | None, step: GenerationStep, rows_R: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_SBD = self._run_stage(Batch(tokens_T.unsqueeze(0), positions=positions_T), x_SBD, None, {}, generation=step)
        if self.head is None or self.norm is None:
            return x_SBD
        x_TD = self.head.gathered_input(self.norm(x_SBD))
        return self.head.logits_of_rows(x_TD.index_select(0, rows_R), self._embedding_weight()), x_TD

    def _logits(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.vocab_shard.full_logits(self.head(x_SBD, self._embedding_weight())).transpose(0, 1)

    def _hidden_states(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.gathered_input(x_SBD).transpose(0, 1)

    def _embedding_weight(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.weight

    def _run_stage(
        self,
        batch: Batch,
        x_SBD: Tensor | None,
        aux_loss_scale: Tensor | None,
        router_statistics: dict[int, Tensor],
        *,
        generation: GenerationStep | None = None,
    ) -> Tensor:
        """Returns the activations after the last layer."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        if self.embedding is not None:
            embedded = self._embed(batch.tokens, positions)
            # The packed tokens of a generation step are rows [T, D] from here on: there is no batch to tell apart.
            x_SBD = embedded if generation is None else embedded.squeeze(1)
        assert x_SBD is not None, "a stage without the embedding takes the activations of the stage before"
        rope_cos_sin = {rotary.spec: rotary(positions, x_SBD.dtype) for rotary in self._rotary_embeddings}
        context = ForwardContext(
            rope_cos_sin,
            batch.documents,
            aux_loss_scale,
            router_statistics=router_statistics,
            generation=generation,
        )
        return self.run_layers(list(self.layers.values()), x_SBD, context)

    def _embed(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        x_SBD = self.embedding(tokens_BS)
        if self.embedding_scale is not None:
            x_SBD = x_SBD * x_SBD.new_full((), self.embedding_scale)
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        return self.embedding_dropout(x_SBD)
