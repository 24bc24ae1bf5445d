"""The module of encoders that predict masked tokens: a decoder's embeddings and layers, and other ends.

S sequence, B batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.layers.forward_context import StatisticsKey
from petatron.layers.pooled_head import PooledHeadSpec
from petatron.layers.prediction_transform import PredictionTransformSpec
from petatron.layers.selected_tokens import place_tokens, select_tokens
from petatron.layers.vocabulary.embedding import PositionEmbedding
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.models.batch import Batch
from petatron.models.decoder import GREEDY_TARGETS, HIDDEN, POOLING_WEIGHTS, TOKEN_LOSSES, Decoder, DecoderParts
from petatron.models.stage_inputs_outputs import StageOutput

ORDER_LOSS, ORDER_LOGITS = "sop loss", "order_logits"
TOKEN_TYPES, ORDER_LABELS = "token_types", "sentence_order"
PREDICTED_POSITIONS = "predicted_positions"
"""Positions [B, P], different ones in each row, among which are all that the loss counts: the head need not compute others."""


class MaskedLanguageParts(DecoderParts, Protocol):
    """What the module reads of its spec (`masked_language_spec.py`)."""

    @property
    def has_final_norm(self) -> bool: ...
    @property
    def transform(self) -> PredictionTransformSpec: ...
    @property
    def order_head(self) -> PooledHeadSpec | None: ...


class MaskedLanguageModel(Decoder):
    """Embeddings, layers and heads; or the part of these that one pipeline stage has."""

    def __init__(self, spec: MaskedLanguageParts, stage: PipelineStage) -> None:
        super().__init__(spec, stage)
        config = spec.config
        has_types = bool(config.num_token_types) and stage.has_embedding
        self.token_type = PositionEmbedding(config.num_token_types, config.hidden_size) if has_types else None
        self.norm = self.norm if spec.has_final_norm else None
        predicts_tokens = stage.has_loss and self.task_head is None
        self.transform = spec.transform.build() if predicts_tokens else None
        if self.head is not None and config.prediction_bias:
            self.head = OutputHead(
                spec.vocab_size,
                config.hidden_size,
                tied=self.head.weight is None,
                input_scale=self.head.input_scale,
                bias=True,
            )
        order_head = spec.order_head if predicts_tokens else None
        self.order_head = None if order_head is None else order_head.build()

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        ends = [self.norm, self.transform, self.head, self.task_head]
        groups = ([self.embedding], [self.position], [self.token_type], [self.embedding_norm], ends, [self.order_head])
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

    def forward(
        self,
        batch: Batch,
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[StatisticsKey, Tensor] | None = None,
        loss_weights: Mapping[str, Tensor] | None = None,
        collect: Collection[str] = (),
    ) -> StageOutput:
        """Runs the stage (see `StageModule`); the last one computes the losses if the batch has labels and nothing is collected.

        It can collect "logits" [B, S, vocabulary], "hidden_states" [B, S, hidden], the output of the last layer, "token_losses" [B, S]
        and "greedy_targets" [B, S] of the labels, and "order_logits" [B, 2]: whether the second segment belongs after the first, or not.
        """
        x_SBD = self._encoder_input(batch, inputs)
        context = self._context(
            batch, x_SBD, {}, aux_loss_scale, {} if router_statistics is None else router_statistics
        )
        x_SBD = self.run_layers(self._main_layers(), x_SBD, context)
        if not self.stage.has_loss:
            return StageOutput({HIDDEN: x_SBD}, {}, {})
        x_SBD = x_SBD if self.norm is None else self.norm(x_SBD)
        if self.task_head is not None:
            return self._task_output(batch, x_SBD, collect)
        assert self.head is not None
        losses: dict[str, Tensor] = {}
        collected: dict[str, Tensor] = {}
        with_losses = "labels" in batch and not collect
        if "hidden_states" in collect:
            collected["hidden_states"] = self._hidden_states(x_SBD)
        if ORDER_LOGITS in collect or (with_losses and self.order_head is not None):
            order_logits = self._order_logits(batch, x_SBD)
            if with_losses:
                losses[ORDER_LOSS] = F.cross_entropy(order_logits, batch[ORDER_LABELS], reduction="none")
            else:
                collected[ORDER_LOGITS] = order_logits
        of_transform = {"logits", TOKEN_LOSSES, GREEDY_TARGETS} & set(collect)
        positions = None if collect else self._predicted_positions(batch, x_SBD)
        read = x_SBD if positions is None else select_tokens(x_SBD, positions)
        predicted = None
        if with_losses or of_transform:
            assert self.transform is not None
            predicted = self.transform(read)
        if predicted is not None and "logits" in collect:
            collected["logits"] = self._logits(predicted)
        if predicted is not None and GREEDY_TARGETS in collect:
            losses[LM_LOSS], greedy_SB = self.head.losses_and_greedy(
                predicted, self._embedding_weight(), batch.labels.t()
            )
            collected[GREEDY_TARGETS] = greedy_SB.t()
        elif predicted is not None and (with_losses or TOKEN_LOSSES in collect):
            weights = None if loss_weights is None else loss_weights[LM_LOSS]
            labels_SB = batch.labels.t()
            if positions is not None:
                labels_SB = labels_SB.gather(0, positions.t())
                weights = None if weights is None else weights.gather(0, positions.t())
            of_tokens = self.head.losses(predicted, self._embedding_weight(), labels_SB, loss_weights_SB=weights)
            losses[LM_LOSS] = of_tokens if positions is None else place_tokens(of_tokens, positions, len(x_SBD))
        if TOKEN_LOSSES in collect:
            collected[TOKEN_LOSSES] = losses[LM_LOSS].t()
        return StageOutput({}, losses, collected)

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary] at each token, gathered on every rank; needs a model on one stage."""
        return self(Batch(tokens_BS, positions=positions), collect=("logits",)).collected["logits"]

    def _encoder_input(self, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.embedding is None:
            return inputs[HIDDEN]
        positions, added = self._positions(batch), None
        if self.token_type is not None:
            types_BS = batch.arrays.get(TOKEN_TYPES)
            added = self.token_type(torch.zeros_like(batch.tokens) if types_BS is None else types_BS)
        return self._embed(batch.tokens, positions + self.config.position_offset, added)

    def _predicted_positions(self, batch: Batch, x_SBD: Tensor) -> Tensor | None:
        """Returns the positions [B, P] that the head is computed at; None: all, also where a rank has a part of each sequence."""
        has_all = batch.sequence_part is None and len(x_SBD) == batch.tokens.shape[1]
        return batch.arrays.get(PREDICTED_POSITIONS) if has_all else None

    def _order_logits(self, batch: Batch, x_SBD: Tensor) -> Tensor:
        """Returns logits [B, 2], whatever part of the sequences this rank has."""
        assert self.order_head is not None, "a model without the head has no such output"
        first_BD = self.order_head.weighted_sum(x_SBD, batch[POOLING_WEIGHTS])
        part = batch.sequence_part
        _, logits = self.order_head(first_BD if part is None else part.all_reduce(first_BD))
        assert logits is not None
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
