"""The decoder model (GPT, LLaMA and relatives), whole or one pipeline stage of it. S sequence, B batch, D hidden."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.config.schema.sections.multi_token_prediction import layers_per_depth
from petatron.layers.dropout import Dropout
from petatron.layers.forward_context import ForwardContext, StatisticsKey
from petatron.layers.mtp import EMBEDDING_AHEAD, embedding_name
from petatron.layers.norm import NormSpec
from petatron.layers.pooled_head import PooledHeadSpec
from petatron.layers.rope import RopeSpec, RotaryEmbedding, split_long_marks
from petatron.layers.spec.generation_state import GenerationStep, Pages
from petatron.layers.transformer_layer import LayerSpec
from petatron.layers.vocabulary.embedding import PositionEmbedding, TokenEmbedding
from petatron.layers.vocabulary.output_head import OutputHead
from petatron.models.batch import Batch
from petatron.models.mtp_and_longrope_arrays import are_rows_long, labels_name, tokens_name
from petatron.models.stage_inputs_outputs import StageOutput
from petatron.models.stage_interface import StageModule, run_layers_sequentially

HIDDEN = "hidden"
"""The name of the tensor between two pipeline stages."""

LABEL_LOGITS, POOLED_STATES, TOKEN_LABEL_LOGITS = "label_logits", "pooled_states", "token_label_logits"
"""Outputs of models with a task head: [B, labels], what the labels are computed from, [B, hidden], and labels of each token as if a
text ended there, [B, S, labels]."""
POOLING_WEIGHTS = "pooling_weights"
"""The array [B, S] of the weights of tokens in the sum that stands for a sequence."""

TOKEN_LOSSES, GREEDY_TARGETS, ENTROPIES = "token_losses", "greedy_targets", "entropies"
"""Names of outputs for which the batch needs labels."""


def mtp_loss(depth: int) -> str:
    """Returns the name of the loss of a depth of multi-token prediction."""
    return f"mtp {depth} loss"


class DecoderParts(Protocol):
    """The attributes of a spec that `Decoder` is built from; `DecoderSpec` has them."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...
    @property
    def final_norm(self) -> NormSpec: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def first_depth_layer(self) -> int: ...
    @property
    def has_position_table(self) -> bool: ...
    @property
    def token_scale(self) -> float | None: ...
    @property
    def embedding_scale(self) -> float | None: ...
    @property
    def embedding_norm(self) -> NormSpec | None: ...
    @property
    def ropes(self) -> tuple[RopeSpec, ...]: ...
    @property
    def layers_need_positions(self) -> bool: ...
    @property
    def original_context(self) -> int | None: ...
    @property
    def tied_params(self) -> Mapping[str, str]: ...
    @property
    def task_head(self) -> PooledHeadSpec | None: ...


class Decoder(StageModule):
    """Embedding, layers, final norm and output head; or the part of these that one pipeline stage has."""

    def __init__(self, spec: DecoderParts, stage: PipelineStage) -> None:
        super().__init__()
        config = self.config = spec.config
        self.stage = stage
        learned = spec.has_position_table and stage.has_embedding
        self.embedding = TokenEmbedding(spec.vocab_size, config.hidden_size) if stage.has_embedding else None
        self.position = PositionEmbedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.token_scale, self.embedding_scale = spec.token_scale, spec.embedding_scale
        embedding_norm = spec.embedding_norm if stage.has_embedding else None
        self.embedding_norm = None if embedding_norm is None else embedding_norm.build()
        self.embedding_dropout = Dropout(config.hidden_dropout)
        self._rotary_embeddings = [RotaryEmbedding(rope) for rope in spec.ropes]  # no parameters
        self._layers_need_positions = spec.layers_need_positions
        self._original_context = spec.original_context
        self.layers = nn.ModuleDict({str(index): spec.layers[index].build(index) for index in stage.layer_indices})
        self._num_depth_layers = len([index for index in stage.layer_indices if index >= spec.first_depth_layer])
        self.num_depths = (config.mtp_num_layers or 0) if self._num_depth_layers else 0
        self.run_layers = run_layers_sequentially
        self.norm = spec.final_norm.build() if stage.has_loss else None
        # A tied head uses the embedding's weight if it is on the same stage, and else has a replica of it.
        tied = bool(spec.tied_params) and self.embedding is not None
        self.head = None
        task_head = spec.task_head if stage.has_loss else None
        self.task_head = None if task_head is None else task_head.build()
        if stage.has_loss and task_head is None:
            scale = None if config.logits_scaling == 1.0 else 1.0 / config.logits_scaling
            sizes, softcap = (spec.vocab_size, config.hidden_size), config.final_logit_softcapping
            self.head = OutputHead(*sizes, tied=tied, input_scale=scale, softcap=softcap)

    def outer_modules(self) -> Sequence[Sequence[nn.Module]]:
        groups = ([self.embedding], [self.position], [self.embedding_norm], [self.norm, self.head, self.task_head])
        return [modules for group in groups if (modules := [module for module in group if module is not None])]

    def reused_params(self) -> Iterator[nn.Parameter]:
        if self.head is not None and self.head.weight is None and self.embedding is not None:
            yield self.embedding.weight
        if self.config.mtp_use_repeated_layer:
            shared = [parameter for layer in self._depth_layers(1) for parameter in layer.parameters()]
            for _ in range(self.num_depths - 1):
                yield from shared

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
        """Runs the stage (see `StageModule`). With `loss_weights`, the output head saves a GEMM.

        The last stage computes the loss if the batch has labels and nothing is collected. It can collect "logits" [B, S, vocabulary] and
        "hidden_states" [B, S, hidden], the input of the output head: of this rank's context-parallel
        part of the sequence, gathered over tensor-parallel ranks. With labels it also collects "token_losses" [B, S],
        "greedy_targets" [B, S], whether a label is the most likely id, and "entropies" [B, S], those of the distributions of labels.
        """
        statistics = {} if router_statistics is None else router_statistics
        x_SBD, ahead = self._stage_input(batch, inputs)
        context = self._context(batch, x_SBD, ahead, aux_loss_scale, statistics)
        x_SBD = self.run_layers(self._main_layers(), x_SBD, context)
        if not self.stage.has_loss or self.norm is None:
            return StageOutput({HIDDEN: x_SBD, **(ahead if self.embedding is not None else {})}, {}, {})
        if self.task_head is not None:
            return self._task_output(batch, self.norm(x_SBD), collect)
        return self._head_output(batch, x_SBD, context, loss_weights, collect)

    def _head_output(
        self,
        batch: Batch,
        x_SBD: Tensor,
        context: ForwardContext,
        loss_weights: Mapping[str, Tensor] | None,
        collect: Collection[str],
    ) -> StageOutput:
        """Returns the losses, or what is collected, of the output of the last layer."""
        assert self.norm is not None and self.head is not None
        x_SBD, losses = self.norm(x_SBD), {}
        compute = {"logits": self._logits, "hidden_states": self._hidden_states}
        collected = {name: compute[name](x_SBD) for name in collect if name in compute}
        if GREEDY_TARGETS in collect:
            losses[LM_LOSS], greedy = self.head.losses_and_greedy(x_SBD, self._embedding_weight(), batch.labels.t())
            collected[GREEDY_TARGETS] = greedy.t()
        elif ENTROPIES in collect:
            losses[LM_LOSS], entropies = self.head.losses_and_entropies(
                x_SBD, self._embedding_weight(), batch.labels.t()
            )
            collected[ENTROPIES] = entropies.t()
        elif TOKEN_LOSSES in collect and "logits" in collected and torch.is_grad_enabled():
            # The output head writes its weight's gradient once per micro-batch: both come from one GEMM.
            losses[LM_LOSS] = _losses_of_logits(collected["logits"], batch.labels).t()
        elif TOKEN_LOSSES in collect or ("labels" in batch and not collect):
            losses = self._losses(batch, x_SBD, context, loss_weights, depths=0 if collect else self.num_depths)
        if TOKEN_LOSSES in collect:
            collected[TOKEN_LOSSES] = losses[LM_LOSS].t()
        return StageOutput({}, losses, collected)

    def _task_output(self, batch: Batch, x_SBD: Tensor, collect: Collection[str]) -> StageOutput:
        """Returns what the task head computes of the final hidden states, whatever part of the sequences this rank has."""
        assert self.task_head is not None
        outputs: dict[str, Tensor] = {}
        if "hidden_states" in collect:
            outputs["hidden_states"] = self.task_head.gather(x_SBD).transpose(0, 1)
        if POOLED_STATES in collect or LABEL_LOGITS in collect:
            summed_BD = self.task_head.weighted_sum(x_SBD, batch[POOLING_WEIGHTS])
            part = batch.sequence_part
            outputs[POOLED_STATES], logits = self.task_head(summed_BD if part is None else part.all_reduce(summed_BD))
            outputs |= {} if logits is None else {LABEL_LOGITS: logits}
        if TOKEN_LABEL_LOGITS in collect:
            outputs[TOKEN_LABEL_LOGITS] = self.task_head.of_tokens(x_SBD, batch.tokens.shape[1]).transpose(0, 1)
        return StageOutput({}, {}, {name: outputs[name] for name in collect})

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, vocabulary], gathered on every rank; needs a model on one stage."""
        return self._logits(self.hidden_states(Batch(tokens_BS, positions=positions)))

    def hidden_states(self, batch: Batch) -> Tensor:
        """Returns this rank's part of the output head's input [S, B, hidden]; needs a model on one stage."""
        assert self.embedding is not None and self.norm is not None
        x_SBD = self._embed(batch.tokens, self._positions(batch))
        return self.norm(self.run_layers(self._main_layers(), x_SBD, self._context(batch, x_SBD)))

    def generation_step(
        self, tokens_T: Tensor, positions_T: Tensor, x_SBD: Tensor | None, step: GenerationStep, rows_R: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch = Batch(tokens_T.unsqueeze(0), positions=positions_T)
        if self.embedding is not None and x_SBD is None:
            # From here on the packed tokens of a generation step are rows [T, D], without a batch dimension.
            x_SBD = self._embed(batch.tokens, positions_T).squeeze(1)
        assert x_SBD is not None, "a stage without the embedding takes the activations of the stage before"
        context = self._context(batch, x_SBD, {}, None, {}, generation=step)
        x_SBD = self.run_layers(self._main_layers(), x_SBD, context)
        if self.head is None or self.norm is None:
            return x_SBD
        x_TD = self.head.gathered_input(self.norm(x_SBD))
        return self.head.logits_of_rows(x_TD.index_select(0, rows_R), self._embedding_weight()), x_TD

    def draft_step(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        hidden_TD: Tensor,
        step: GenerationStep,
        rows_R: Tensor,
        *,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """Runs one MTP depth on packed rows: for each position, the hidden state of the previous depth and a token ahead.

        Returns logits of the rows `rows_R` and the hidden states of all rows, like `generation_step`; needs a model on one stage.
        """
        assert self.embedding is not None and self.head is not None
        ahead_TD = self._embed(tokens_T.unsqueeze(0), positions_T).squeeze(1)
        if self.config.mtp_use_repeated_layer:
            step = replace(step, pages=self._pages_of_depth(step, depth))
        batch = Batch(tokens_T.unsqueeze(0), positions=positions_T)
        context = self._context(batch, hidden_TD, {}, None, {}, generation=step)
        x_TD = self.head.gathered_input(self._run_depth(depth, hidden_TD, ahead_TD, context))
        return self.head.logits_of_rows(x_TD.index_select(0, rows_R), self._embedding_weight()), x_TD

    def _logits(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.vocab_shard.full_logits(self.head(x_SBD, self._embedding_weight())).transpose(0, 1)

    def _hidden_states(self, x_SBD: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.gathered_input(x_SBD).transpose(0, 1)

    def _embedding_weight(self) -> Tensor | None:
        return None if self.embedding is None else self.embedding.weight

    def _losses(
        self,
        batch: Batch,
        x_SBD: Tensor,
        context: ForwardContext,
        loss_weights: Mapping[str, Tensor] | None,
        *,
        depths: int,
    ) -> dict[str, Tensor]:
        """Returns the token losses of the next token and of the MTP depths; the output head runs once for all of them."""
        assert self.head is not None
        hidden, labels = [x_SBD], [batch.labels]
        for depth in range(1, 1 + depths):
            ahead_SBD = context.tensors[embedding_name(depth)]
            hidden.append(self._run_depth(depth, hidden[-1], ahead_SBD, context))
            labels.append(batch[labels_name(depth)])
        names = [LM_LOSS, *(mtp_loss(depth) for depth in range(1, len(hidden)))]
        weights = None
        if loss_weights is not None:
            weights = torch.cat([loss_weights[name] for name in names], dim=1) if depths else loss_weights[LM_LOSS]
        together = torch.cat(hidden, dim=1) if depths else x_SBD
        targets_SB = (torch.cat(labels) if depths else batch.labels).t()
        losses = self.head.losses(together, self._embedding_weight(), targets_SB, loss_weights_SB=weights)
        return dict(zip(names, losses.chunk(len(names), dim=1), strict=True)) if depths else {LM_LOSS: losses}

    def _main_layers(self) -> list[nn.Module]:
        """Returns the layers without those of the MTP depths."""
        layers = list(self.layers.values())
        return layers[: len(layers) - self._num_depth_layers]

    def _depth_layers(self, depth: int) -> list[nn.Module]:
        """Returns the layers of one MTP depth; with `mtp_use_repeated_layer` all depths share them."""
        layers, count = list(self.layers.values()), layers_per_depth(self.config)
        first = len(layers) - self._num_depth_layers
        first += 0 if self.config.mtp_use_repeated_layer else count * (depth - 1)
        return layers[first : first + count]

    def _run_depth(self, depth: int, x_SBD: Tensor, ahead_SBD: Tensor, context: ForwardContext) -> Tensor:
        """Runs an MTP depth on the hidden states of the previous depth and the embeddings of tokens ahead."""
        # A repeated layer would overwrite its router statistics, and recompute writes them twice: collect per depth, then add.
        statistics: dict[int, Tensor] = {}
        tensors = {**context.tensors, EMBEDDING_AHEAD: ahead_SBD}
        context_of_depth = replace(context, tensors=tensors, router_statistics=statistics)
        x_SBD = self.run_layers(self._depth_layers(depth), x_SBD, context_of_depth)
        again = depth > 1 and self.config.mtp_use_repeated_layer
        for layer, counted in statistics.items():
            context.router_statistics[layer] = context.router_statistics[layer] + counted if again else counted
        return x_SBD

    def _pages_of_depth(self, step: GenerationStep, depth: int) -> Mapping[int, Pages]:
        """Returns the pages of a step, in which the shared layers have the pages of one depth."""
        count, first = layers_per_depth(self.config), self.config.num_layers
        moved = {index: step.pages.get(index + count * (depth - 1)) for index in range(first, first + count)}
        return {**step.pages, **{index: pages for index, pages in moved.items() if pages is not None}}

    def _stage_input(self, batch: Batch, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the input of the first layer, and the embeddings of tokens ahead by name."""
        names = [embedding_name(depth) for depth in range(1, 1 + (self.config.mtp_num_layers or 0))]
        if self.embedding is None:
            return inputs[HIDDEN], {name: inputs[name] for name in names}
        if not names:
            return self._embed(batch.tokens, self._positions(batch)), {}
        tokens = torch.cat([batch.tokens, *(batch[tokens_name(1 + k)] for k in range(len(names)))])
        x_SBD, *ahead = self._embed(tokens, self._positions(batch)).chunk(1 + len(names), dim=1)
        # Each gets its own memory: a view would keep the whole lookup alive for backward.
        return x_SBD.clone(), {name: x.contiguous() for name, x in zip(names, ahead, strict=True)}

    def _positions(self, batch: Batch) -> Tensor:
        positions = batch.positions
        return torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if positions is None else positions

    def _context(
        self,
        batch: Batch,
        x_SBD: Tensor,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        aux_loss_scale: Tensor | None = None,
        router_statistics: dict[StatisticsKey, Tensor] | None = None,
        *,
        generation: GenerationStep | None = None,
    ) -> ForwardContext:
        positions, is_long = self._positions(batch), False
        if self._original_context is not None and generation is not None:
            positions, long_T = split_long_marks(positions)
            is_long = long_T.unsqueeze(1)
        elif self._original_context is not None:
            is_long = are_rows_long(batch, self._original_context)
        return ForwardContext(
            {rotary.spec: rotary(positions, x_SBD.dtype, is_long=is_long) for rotary in self._rotary_embeddings},
            batch.documents,
            aux_loss_scale,
            tensors,
            router_statistics={} if router_statistics is None else router_statistics,
            generation=generation,
            positions=positions if self._layers_need_positions else None,
        )

    def _embed(self, tokens_BS: Tensor, positions: Tensor, added_SBD: Tensor | None = None) -> Tensor:
        """Embeds tokens; `added_SBD` is what else is added to their embeddings and those of positions."""
        assert self.embedding is not None
        x_SBD = self.embedding(tokens_BS)
        if self.token_scale is not None:
            x_SBD = x_SBD * x_SBD.new_full((), self.token_scale)
        if self.position is not None:
            x_SBD = x_SBD + self.position(positions)
        if added_SBD is not None:
            x_SBD = x_SBD + added_SBD
        if self.embedding_scale is not None:
            x_SBD = x_SBD * x_SBD.new_full((), self.embedding_scale)
        if self.embedding_norm is not None:
            x_SBD = self.embedding_norm(x_SBD)
        return self.embedding_dropout(x_SBD)


def _losses_of_logits(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Returns token losses [B, S] in at least float32."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels_BS.flatten(), reduction="none").view(labels_BS.shape)
