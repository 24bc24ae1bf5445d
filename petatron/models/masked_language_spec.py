"""Encoders that predict masked tokens (BERT, RoBERTa, ModernBERT): their spec, made from the settings of a model.

Their layers are a decoder's, but every token sees all others of its document. What differs is outside of the layers: embeddings of
segments, a transform and a bias before the loss of masked tokens, and a head on the first token that tells whether the second segment
belongs after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from petatron.base.errors import ConfigError, Problem
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.config.schema.sections.masked_language import MASKED_LANGUAGE_MODEL
from petatron.kernels.activation import GATE_ACTIVATIONS
from petatron.layers.attention import AttentionSpec
from petatron.layers.pooled_head import PooledHeadSpec
from petatron.layers.prediction_transform import PredictionTransformSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.models import branch_specs
from petatron.models.batch import Batch
from petatron.models.decoder import GREEDY_TARGETS, TOKEN_LOSSES
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.models.masked_language_model import (
    ORDER_LOGITS,
    ORDER_LOSS,
    POOLING_WEIGHTS,
    MaskedLanguageModel,
)
from petatron.models.mtp_and_longrope_arrays import LOSS_WEIGHTS
from petatron.models.stage_inputs_outputs import LossSpec, ModelIO
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Shard

MODULES = (
    "embedding",
    "position",
    "token_type",
    "embedding_norm",
    "norm",
    "transform",
    "head",
    "order_head",
    "task_head",
)
"""Those outside of the layers, in their order."""


@dataclass(frozen=True, slots=True)
class MaskedLanguageSpec(DecoderSpec):
    """Embeddings of tokens, positions and segments, layers, and two heads with a loss each."""

    __hash__ = DecoderSpec.__hash__

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm after the last layer, which does not end with one."""
        return self.config.norm_placement != "post"

    @property
    def transform(self) -> PredictionTransformSpec:
        config = self.config
        name = config.prediction_activation or GATE_ACTIVATIONS.get(config.activation, config.activation)
        norm, bias = branch_specs.norm_spec(config), config.add_bias_linear
        return PredictionTransformSpec(norm=norm, activation=name, bias=bias, std=config.init_method_std)

    @property
    def order_head(self) -> PooledHeadSpec | None:
        """The head that tells whether the second segment belongs after the first; None: it is not asked."""
        config = self.config
        if not config.bert_binary_head or self.task_head is not None:
            return None
        return PooledHeadSpec(hidden_size=config.hidden_size, num_outputs=2, std=config.init_method_std)

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings - self.config.position_offset

    @property
    def modules_before_layers(self) -> tuple[str, ...]:
        return MODULES[:4]

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        if self.task_head is not None:
            return super(MaskedLanguageSpec, self).io(stages)
        order = (LossSpec(ORDER_LOSS, per="sample"),) if self.config.bert_binary_head else ()
        return replace(
            super(MaskedLanguageSpec, self).io(stages),
            losses=(LossSpec(LM_LOSS, token_weights=LOSS_WEIGHTS), *order),
            outputs=("logits", "hidden_states", TOKEN_LOSSES, GREEDY_TARGETS, *([ORDER_LOGITS] if order else [])),
            extend_batch=_weight_first_tokens if order else None,
        )

    def build_stage(self, stage: PipelineStage) -> MaskedLanguageModel:
        return MaskedLanguageModel(self, stage)

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        params = {
            **super(MaskedLanguageSpec, self).outer_params(stage, tied_across_ranks=tied_across_ranks),
            **(self._first_params() if stage.has_embedding else {}),
            **(self._last_params() if stage.has_loss else {}),
        }
        if not self.has_final_norm:
            params = {name: param for name, param in params.items() if not name.startswith("norm.")}
        params = {name: _with_former_name(name, param) for name, param in params.items()}
        order = {name: number for number, name in enumerate(MODULES)}
        return dict(sorted(params.items(), key=lambda item: order[item[0].partition(".")[0]]))

    def _first_params(self) -> dict[str, ParamSpec]:
        count, width, std = self.config.num_token_types, self.config.hidden_size, self.config.embedding_init_method_std
        table = ParamSpec(shape=(count, width), shard=REPLICATED, init=NormalValues(std), weight_decay=True)
        return {"token_type.weight": table} if count else {}

    def _last_params(self) -> dict[str, ParamSpec]:
        if self.task_head is not None:
            return {}
        config, params = self.config, with_prefix("transform", self.transform.params())
        if config.prediction_bias:
            shard = Shard(tp=0, pad_to=config.make_vocab_size_divisible_by)
            params["head.bias"] = ParamSpec(shape=(self.vocab_size,), shard=shard)
        return params if self.order_head is None else params | with_prefix("order_head", self.order_head.params())

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        saved = super(MaskedLanguageSpec, self).outer_saved_bytes(shape, stage)
        if stage.has_embedding and self.config.num_token_types:
            saved += 8 * shape.gathered_tokens
        if not stage.has_loss:
            return saved
        if not self.has_final_norm:
            saved -= self.final_norm.saved_bytes(shape, shape.tokens)
        return saved if self.task_head is not None else saved + self.transform.saved_bytes(shape)


def _with_former_name(name: str, param: ParamSpec) -> ParamSpec:
    """Lets the pooler of a task head begin with that of the head for the order of segments."""
    pooler = "task_head.pooler."
    return (
        replace(param, former_name=f"order_head.pooler.{name.removeprefix(pooler)}")
        if name.startswith(pooler)
        else param
    )


def masked_language_spec(config: ModelConfig, moe: MoEConfig) -> MaskedLanguageSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.validate import load_config
    >>> flags = ["--model-type", "bert", "--vocab-size", "256"]
    >>> run = load_config(flags, preset="tiny-llama", require_training=False).config
    >>> masked_language_spec(run.model, run.moe).layers[0].mixer.visibility.kind
    'full'
    """
    spec = decoder_spec(config, moe)
    layers = [_seeing_all(layer) for layer in spec.layers]
    if not config.first_attention_norm and isinstance(layers[0].mixer, AttentionSpec):
        layers[0] = replace(layers[0], unnormed=(layers[0].mixer.name,))
    return MaskedLanguageSpec(config, spec.moe, tuple(layers), spec.final_norm)


def _seeing_all(layer: LayerSpec) -> LayerSpec:
    attention = layer.mixer
    if not isinstance(attention, AttentionSpec):
        kind = "none" if attention is None else attention.name
        rule = f"sees all tokens, and a layer mixes the sequence by {kind}"
        raise ConfigError(
            [Problem("--model-type", MASKED_LANGUAGE_MODEL, rule, "Use layers of attention without latents.")]
        )
    return replace(layer, mixer=replace(attention, visibility=replace(attention.visibility, kind="full")))


def _weight_first_tokens(batch: Batch) -> Batch:
    """Weights the first token of each whole sequence, which the order head reads, before context parallelism splits them."""
    weights = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    weights[:, 0] = 1.0
    return batch.with_arrays(**{POOLING_WEIGHTS: weights})
