"""The decoder of the GPT and LLaMA families, dense or with experts: its spec, made from the settings of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.attention_layer_freq import linear_layers
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.config.schema.run import RunConfig
from petatron.config.schema.sections.hybrid import (
    ATTENTION,
    DELTA,
    EXPERTS,
    MAMBA,
    MLP,
    PARALLEL,
    all_symbols,
    branch_symbols,
)
from petatron.config.schema.sections.linear_attention import has_linear_variant
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.kernels.fused_linear_cross_entropy import chunk_tokens
from petatron.layers.attention import AttentionSpec
from petatron.layers.mla import MlaSpec
from petatron.layers.mtp import depth_layers, embedding_name
from petatron.layers.norm import NormSpec
from petatron.layers.pooled_head import PooledHeadSpec
from petatron.layers.rope import RopeSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import BranchSpec
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, with_prefix
from petatron.layers.transformer_layer import LayerSpec
from petatron.models import branch_specs
from petatron.models.batch import Batch
from petatron.models.decoder import (
    ENTROPIES,
    GREEDY_TARGETS,
    HIDDEN,
    LABEL_LOGITS,
    POOLED_STATES,
    TOKEN_LABEL_LOGITS,
    TOKEN_LOSSES,
    Decoder,
    mtp_loss,
)
from petatron.models.model_spec import ModelSpec
from petatron.models.mtp_and_longrope_arrays import (
    LOSS_WEIGHTS,
    add_shifted_arrays,
    mark_long_rows,
    mask_name,
    weights_name,
)
from petatron.models.stage_inputs_outputs import BoundaryTensor, LossSpec, ModelIO
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Shard


@dataclass(frozen=True, slots=True)
class DecoderSpec(ModelSpec):
    """Token embedding, layers, norm, output head; the loss of the next token, and of further ones with multi-token prediction.

    Its depths are the last of `layers`, after the `num_layers` of the config.
    """

    config: ModelConfig
    moe: MoEConfig | None
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec

    def __hash__(self) -> int:
        """Hashes a few sizes: estimates look a spec up thousands of times, and equality compares every field."""
        return hash((self.config.hidden_size, self.config.seq_length, len(self.layers), self.final_norm))

    @property
    def embedding_norm(self) -> NormSpec | None:
        """The norm of embeddings before the first layer."""
        return branch_specs.norm_spec(self.config) if self.config.embed_layernorm else None

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary embeddings of all layers."""
        branches = (branch for layer in self.count_layers() for branch in layer.branches)
        ropes = (branch.rope for branch in branches if isinstance(branch, AttentionSpec | MlaSpec))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def layers_need_positions(self) -> bool:
        """Whether attention needs the positions of tokens besides rope's cos and sin."""
        branches = (branch for layer in self.count_layers() for branch in layer.branches)
        return any(isinstance(branch, AttentionSpec) and branch.needs_positions for branch in branches)

    @property
    def token_scale(self) -> float | None:
        """The factor on the embeddings of tokens alone; None: 1."""
        return math.sqrt(self.config.hidden_size) if self.config.scale_embeddings else None

    @property
    def embedding_scale(self) -> float | None:
        """The factor on embeddings, those of positions included; None: 1."""
        return None if self.config.embedding_multiplier == 1.0 else self.config.embedding_multiplier

    @property
    def original_context(self) -> int | None:
        """The length after which a sequence has LongRoPE's long factors; None for other positions."""
        scaled = any(rope.long_divisors for rope in self.ropes)
        return self.config.original_max_position_embeddings if scaled else None

    @property
    def num_predictions(self) -> int:
        return 1 + (self.config.mtp_num_layers or 0)

    @property
    def first_depth_layer(self) -> int:
        """The index of the first layer of multi-token prediction, after all others."""
        return self.config.num_layers

    @property
    def has_position_table(self) -> bool:
        return self.config.position_embedding_type == "learned_absolute" or self.config.learned_position_table

    @property
    def task_head(self) -> PooledHeadSpec | None:
        """The head on whole texts, which a model has in place of its output head; None: it predicts tokens."""
        config = self.config
        if config.pooling is None:
            return None
        return PooledHeadSpec(
            hidden_size=config.hidden_size,
            num_outputs=config.num_labels,
            std=config.init_method_std,
            pooler=config.pooler,
            out_bias=config.label_bias,
        )

    @property
    def tied_params(self) -> Mapping[str, str]:
        untied = self.config.untie_embeddings_and_output_weights or self.task_head is not None
        return {} if untied else {"head.weight": "embedding.weight"}

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        hidden = (BoundaryTensor(HIDDEN, self.config.hidden_size),)
        depths, weight = range(1, self.num_predictions), self.config.mtp_loss_scaling_factor
        ahead = [BoundaryTensor(embedding_name(depth), self.config.hidden_size) for depth in depths]
        if (head := self.task_head) is not None:
            return ModelIO(
                boundaries=((), *(hidden,) * (len(stages) - 1)),
                losses=(),
                outputs=(
                    "hidden_states",
                    POOLED_STATES,
                    *((LABEL_LOGITS, TOKEN_LABEL_LOGITS) if head.num_outputs else ()),
                ),
                sequence_order="contiguous" if self.sequence_sharding == "contiguous" else "zigzag",
                extend_batch=self._extend_batch if self.original_context is not None else None,
            )
        return ModelIO(
            boundaries=((), *((*hidden, *ahead),) * (len(stages) - 1)),
            losses=(
                LossSpec(LM_LOSS, token_weights=LOSS_WEIGHTS),
                *(
                    LossSpec(mtp_loss(k), mask_name(k), weight / len(depths), token_weights=weights_name(k))
                    for k in depths
                ),
            ),
            outputs=("logits", "hidden_states", TOKEN_LOSSES, GREEDY_TARGETS, ENTROPIES),
            sequence_order="contiguous" if self.sequence_sharding == "contiguous" else "zigzag",
            extend_batch=self._extend_batch if depths or self.original_context is not None else None,
        )

    def _extend_batch(self, batch: Batch) -> Batch:
        """Adds what whole sequences say, before context parallelism splits them."""
        if self.num_predictions > 1:
            batch = add_shifted_arrays(batch, depths=self.num_predictions - 1)
        return batch if self.original_context is None else mark_long_rows(batch, self.original_context)

    def build_stage(self, stage: PipelineStage) -> Decoder:
        return Decoder(self, stage)

    def outer_params(self, stage: PipelineStage, *, tied_across_ranks: bool = False) -> Mapping[str, ParamSpec]:
        config, params = self.config, dict[str, ParamSpec]()
        replicated = bool(self.tied_params) and tied_across_ranks
        shard = Shard(tp=0, pad_to=config.make_vocab_size_divisible_by, shared_embedding=replicated)
        table = ParamSpec(
            shape=(self.vocab_size, config.hidden_size),
            shard=shard,
            init=NormalValues(config.embedding_init_method_std),
            role="vocabulary",
            weight_decay=True,
        )
        if stage.has_embedding:
            params["embedding.weight"] = table
        if stage.has_embedding and self.has_position_table:
            rows = (config.max_position_embeddings, config.hidden_size)
            params["position.weight"] = replace(table, shape=rows, shard=REPLICATED, role="other")
        if stage.has_embedding and self.embedding_norm is not None:
            params |= with_prefix("embedding_norm", self.embedding_norm.params())
        if stage.has_loss:
            params |= with_prefix("norm", self.final_norm.params())
        if stage.has_loss and self.task_head is not None:
            fresh = {name: replace(param, fresh_if_missing=True) for name, param in self.task_head.params().items()}
            return params | with_prefix("task_head", fresh)
        if stage.has_loss and not (self.tied_params and stage.has_embedding):
            shard = replace(shard, replica_of="embedding.weight") if replicated else shard
            like_table = bool(self.tied_params) or config.use_mup
            init = table.init if like_table else NormalValues(config.init_method_std)
            params["head.weight"] = replace(table, shard=shard, init=init, is_gemm=True)
        return params

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns the bytes of positions, embedding, last norm and loss."""
        config = self.config
        saved = sum(2 * shape.sequence * rope.rotary_dim * shape.element_bytes for rope in self.ropes)
        if stage.has_embedding:
            saved += shape.dropout_mask_bytes(config.hidden_size, config.hidden_dropout)
            saved += 8 * shape.sequence if self.has_position_table else 0
            if self.embedding_norm is not None:
                saved += self.num_predictions * self.embedding_norm.saved_bytes(shape, shape.tokens)
            # Row indices of this rank's vocabulary shard, or of tokens with those ahead of them.
            own_indices = shape.tp > 1 or self.num_predictions > 1
            saved += 8 * self.num_predictions * shape.gathered_tokens if own_indices else 0
        if stage.has_loss:
            saved += self.final_norm.saved_bytes(shape, shape.tokens)
            if self.task_head is not None:
                return saved
            # The gradient of the output GEMM's input.
            saved += self.num_predictions * shape.activation_bytes(shape.gathered_tokens, config.hidden_size)
            if shape.fully_sharded:
                rows = padded_rows(self.vocab_size, config.make_vocab_size_divisible_by, shape.tp) // shape.tp
                saved += rows * config.hidden_size * shape.compute_bytes
        return saved

    def loss_workspace_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of a chunk's logits and of its input's gradient, and of the output of the last norm."""
        width, config = self.config.hidden_size, self.config
        if self.task_head is not None:
            return shape.activation_bytes(shape.tokens, width)
        rows = padded_rows(self.vocab_size, config.make_vocab_size_divisible_by, shape.tp) // shape.tp
        tokens = chunk_tokens(shape.gathered_tokens, rows, shape.element_bytes)
        # In FP8, the gradient in both orientations, and the weight.
        fp8 = rows * (2 * tokens + width) if shape.fp8_output_head_backward else 0
        return fp8 + shape.activation_bytes(tokens, rows + width) + shape.activation_bytes(shape.gathered_tokens, width)


def decoder_spec(config: ModelConfig, moe: MoEConfig) -> DecoderSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.validate import load_config
    >>> run = load_config(["--vocab-size", "256", "--num-experts", "4"], preset="tiny-llama", require_training=False).config
    >>> spec = decoder_spec(run.model, run.moe)
    >>> type(spec.layers[0].channel_mixer).__name__, len(spec.layers) == run.model.num_layers
    ('MoESpec', True)
    """
    if config.hybrid_layer_pattern is not None:
        return hybrid_spec(config, moe, config.hybrid_layer_pattern)
    plain = branch_specs.plain_layer(config)
    mlp = branch_specs.mlp_spec(config, config.ffn_hidden_size)
    is_moe = moe_layers(RunConfig(model=config, moe=moe))
    experts = branch_specs.moe_spec(config, moe) if any(is_moe) else None
    variant = config.experimental_attention_variant
    linear = branch_specs.LINEAR_ATTENTION[str(variant)](config) if has_linear_variant(config) else None
    mixers = (
        linear if chosen and linear is not None else attention
        for chosen, attention in zip(linear_layers(config), branch_specs.attention_specs(config), strict=True)
    )
    channel_mixers = (experts if chosen and experts is not None else mlp for chosen in is_moe)
    layers = tuple(
        replace(plain, mixer=mixer, channel_mixer=channel_mixer) for mixer, channel_mixer in zip(mixers, channel_mixers)
    )
    layers += _depth_layers(config, layers[-1:])
    return DecoderSpec(config, None if experts is None else moe, layers, plain.norm)


def _depth_layers(config: ModelConfig, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the layers of the depths of multi-token prediction, each of which has these layers."""
    depths, repeated = config.mtp_num_layers or 0, config.mtp_use_repeated_layer
    return depth_layers(layers, num_depths=depths, repeated=repeated, std=config.init_method_std)


def hybrid_spec(config: ModelConfig, moe: MoEConfig, pattern: str) -> DecoderSpec:
    """Makes the spec of a model whose layers are given by a layer pattern (hybrids)."""
    plain, symbols = branch_specs.plain_layer(config), branch_symbols(all_symbols(config))
    attention = list(branch_specs.attention_specs(config)) if ATTENTION in symbols else []
    others: dict[str, Callable[[], BranchSpec]] = {
        MAMBA: lambda: branch_specs.mamba2_spec(config),
        DELTA: lambda: branch_specs.delta_spec(config),
        MLP: lambda: branch_specs.mlp_spec(config, config.ffn_hidden_size),
        EXPERTS: lambda: branch_specs.moe_spec(config, moe),
    }
    made = {symbol: others[symbol]() for symbol in set(symbols) - {ATTENTION}}

    def layer(index: int, symbol: str) -> LayerSpec:
        branch = attention[index] if symbol in (ATTENTION, PARALLEL) else made[symbol]
        mixes = symbol in (MAMBA, DELTA, ATTENTION, PARALLEL)
        return replace(
            plain,
            mixer=branch if mixes else None,
            second_mixer=made[MAMBA] if symbol == PARALLEL else None,
            residual_branches="parallel_shared_norm" if symbol == PARALLEL else "sequential",
            channel_mixer=None if mixes else branch,
        )

    layers = tuple(layer(index, symbol) for index, symbol in enumerate(pattern))
    in_depth = config.mtp_hybrid_override_pattern or "" if config.mtp_num_layers else ""
    layers += _depth_layers(config, [layer(-1, symbol) for symbol in in_depth])  # with the last layer's attention
    return DecoderSpec(config, moe if EXPERTS in symbols else None, layers, plain.norm)
