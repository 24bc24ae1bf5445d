"""Recommenders (SASRec, HSTU): their spec, made from the settings of a model.

Their items are a vocabulary that is too large for one rank, in a table whose rows are split over all ranks of a stage with its end
(`layers/vocabulary/row_sharded_table.py`). Layers are a decoder's, causal attention and MLPs with learned positions (Kang & McAuley,
"Self-Attentive Sequential Recommendation", 2018), or HSTU (`layers/hstu.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.layers.hstu import HstuSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import ParamSpec
from petatron.models import branch_specs
from petatron.models.decoder_spec import DecoderSpec, decoder_spec
from petatron.models.next_item import TARGET_RANKS
from petatron.models.recommender import (
    FULL_SOFTMAX_LOSS,
    ITEM_SCORES,
    SAMPLED_SOFTMAX_LOSS,
    Recommender,
    mark_last_items,
)
from petatron.models.stage_inputs_outputs import LossSpec, ModelIO
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Shard

ITEM_ROWS = Shard(tp=0, pad_to=1, rows_over_data=True)


@dataclass(frozen=True, slots=True)
class RecommenderSpec(DecoderSpec):
    """A table of items, layers over a history, and one loss."""

    __hash__ = DecoderSpec.__hash__

    @property
    def tied_params(self) -> Mapping[str, str]:
        """None: where the table is tied, the head computes with the module that looks items up."""
        return {}

    @property
    def modules_before_layers(self) -> tuple[str, ...]:
        return ("embedding", "position", "embedding_norm")

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        sampled = self.config.item_loss == "sampled_softmax"
        return replace(
            super(RecommenderSpec, self).io(stages),
            losses=(LossSpec(SAMPLED_SOFTMAX_LOSS if sampled else FULL_SOFTMAX_LOSS),),
            outputs=("hidden_states", ITEM_SCORES, TARGET_RANKS),
            extend_batch=mark_last_items,
        )

    def build_stage(self, stage: PipelineStage) -> Recommender:
        return Recommender(self, stage)

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        params = dict(super(RecommenderSpec, self).outer_params(stage))
        table = ParamSpec(
            shape=(self.vocab_size, self.config.hidden_size),
            shard=ITEM_ROWS,
            init=NormalValues(self.config.embedding_init_method_std),
            role="vocabulary",
        )
        params.pop("head.weight", None)
        tied = not self.config.untie_embeddings_and_output_weights
        full = self.config.item_loss == "full_softmax"
        if stage.has_embedding:
            params["embedding.weight"] = table
        if stage.has_loss and not (tied and stage.has_embedding):
            params["output_embedding.weight"] = replace(table, is_gemm=full)
        return params

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns those of a decoder, besides the places of items among the distinct ones, and the scores of sampled items."""
        config = self.config
        saved = super(RecommenderSpec, self).outer_saved_bytes(replace(shape, fully_sharded=False), stage)
        saved += 8 * shape.gathered_tokens if stage.has_embedding else 0
        if stage.has_loss and config.item_loss == "sampled_softmax":
            candidates = shape.batch * config.num_item_negatives * (config.item_negatives != "in_batch")
            candidates += shape.gathered_tokens * (config.item_negatives != "uniform")
            rows = candidates + shape.gathered_tokens
            saved += 2 * shape.gathered_tokens * candidates * shape.compute_bytes
            saved += shape.activation_bytes(rows, config.hidden_size)
        return saved


def recommender_spec(config: ModelConfig, moe: MoEConfig) -> RecommenderSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.validate import load_config
    >>> flags = ["--model-type", "recommender", "--vocab-size", "256", "--recommender-layers", "hstu"]
    >>> run = load_config(flags, preset="tiny-llama", require_training=False).config
    >>> recommender_spec(run.model, run.moe).layers[0].mixer.time_buckets
    128
    """
    spec = decoder_spec(config, moe)
    layers = spec.layers
    if config.recommender_layers == "hstu":
        layer = replace(branch_specs.plain_layer(config), mixer=hstu_spec(config))
        layers = (layer,) * config.num_layers
    return RecommenderSpec(config, spec.moe, layers, spec.final_norm)


def hstu_spec(config: ModelConfig) -> HstuSpec:
    return HstuSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.kv_channels,
        value_dim=config.hstu_value_dim,
        max_length=config.max_position_embeddings,
        time_buckets=config.hstu_time_buckets,
        norm_eps=config.norm_epsilon,
        out_bias=config.add_bias_linear,
        dropout=config.hidden_dropout,
        std=config.init_method_std,
        out_std=branch_specs.out_std(config),
    )
