"""The decoder of the GPT and LLaMA families, dense or with experts: its spec, made from the settings of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from petatron.config.pipeline_stages import PipelineStage
from petatron.config.required_settings import required
from petatron.config.schema.hybrid_pattern import ATTENTION, DELTA, EXPERTS, MAMBA, MLP
from petatron.config.schema.layer_patterns import linear_layers, no_rope_layers, window_layers
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.config.schema.run import RunConfig
from petatron.kernels.activation import GluBounds
from petatron.layers.attention import AttentionSpec
from petatron.layers.attention_positions import AttentionTemperature
from petatron.layers.mla import MlaSpec
from petatron.layers.mlp import MLPSpec
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.mtp import MtpLayerSpec, embedding_name
from petatron.layers.norm import NormSpec
from petatron.layers.rope import RopeSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch import BranchSpec, residual_std
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, with_prefix
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.layers.ssm.mamba2 import Mamba2Spec
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.decoder import GREEDY_TARGETS, HIDDEN, LM_LOSS, TOKEN_LOSSES, Decoder, mtp_loss
from petatron.models.model_spec import ModelSpec
from petatron.models.mtp_batch import add_shifted_arrays, mask_name
from petatron.models.rope_settings import is_longer_than_original, rope_spec
from petatron.models.stage_inputs_outputs import BoundaryTensor, LossSpec, ModelIO
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Shard, padded_rows

MAMBA_CONV_WIDTH = 4
"""Tokens that the convolution of every published Mamba-2 sees."""
_SINKS: Mapping[str, Literal["learned", "zero"] | None] = {
    "vanilla": None,
    "off-by-one": "zero",
    "learnable": "learned",
}


@dataclass(frozen=True, slots=True)
class DecoderSpec(ModelSpec):
    """Token embedding, layers, norm, output head; the loss of the next token, and of further ones with multi-token prediction.

    Its depths are the last of `layers`, after the `num_layers` of the config.
    """

    config: ModelConfig
    moe: MoEConfig | None
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary embeddings of all layers."""
        mixers = (layer.mixer for layer in dict.fromkeys(self.layers))
        ropes = (mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec | MlaSpec))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def layers_need_positions(self) -> bool:
        """Whether attention needs the positions of tokens besides rope's cos and sin."""
        mixers = (layer.mixer for layer in dict.fromkeys(self.layers))
        return any(isinstance(mixer, AttentionSpec) and mixer.needs_positions for mixer in mixers)

    @property
    def embedding_scale(self) -> float | None:
        """The factor on embeddings; None: 1."""
        if self.config.scale_embeddings:
            return math.sqrt(self.config.hidden_size)
        return None if self.config.embedding_multiplier == 1.0 else self.config.embedding_multiplier

    @property
    def max_positions(self) -> int:
        """Those of the original context, where LongRoPE's short factors are used."""
        config = self.config
        if config.longrope_short_factor is None or is_longer_than_original(config):
            return config.max_position_embeddings
        return min(config.max_position_embeddings, config.original_max_position_embeddings)

    @property
    def num_predictions(self) -> int:
        return 1 + (self.config.mtp_num_layers or 0)

    @property
    def has_position_table(self) -> bool:
        return self.config.position_embedding_type == "learned_absolute"

    @property
    def tied_params(self) -> Mapping[str, str]:
        untied = self.config.untie_embeddings_and_output_weights
        return {} if untied else {"head.weight": "embedding.weight"}

    def io(self, stages: Sequence[PipelineStage]) -> ModelIO:
        hidden = (BoundaryTensor(HIDDEN, self.config.hidden_size),)
        depths, weight = range(1, self.num_predictions), self.config.mtp_loss_scaling_factor
        ahead = [BoundaryTensor(embedding_name(depth), self.config.hidden_size) for depth in depths]
        return ModelIO(
            boundaries=((), *((*hidden, *ahead),) * (len(stages) - 1)),
            losses=(LossSpec(LM_LOSS), *(LossSpec(mtp_loss(k), mask_name(k), weight / len(depths)) for k in depths)),
            outputs=("logits", "hidden_states", TOKEN_LOSSES, GREEDY_TARGETS),
            sequence_order="contiguous" if self.sequence_sharding == "contiguous" else "zigzag",
            extend_batch=partial(add_shifted_arrays, depths=len(depths)) if depths else None,
        )

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
        if stage.has_loss:
            params |= with_prefix("norm", self.final_norm.params())
        if stage.has_loss and not (self.tied_params and stage.has_embedding):
            shard = replace(shard, replica_of="embedding.weight") if replicated else shard
            init = table.init if self.tied_params else NormalValues(config.init_method_std)
            params["head.weight"] = replace(table, shard=shard, init=init, is_gemm=True)
        return params

    def outer_saved_bytes(self, shape: ActivationShape, stage: PipelineStage) -> int:
        """Returns the bytes of positions, embedding, last norm and loss."""
        config = self.config
        saved = sum(2 * shape.sequence * rope.rotary_dim * shape.element_bytes for rope in self.ropes)
        saved += 8 * shape.sequence if self.layers_need_positions else 0
        if stage.has_embedding:
            saved += shape.dropout_mask_bytes(config.hidden_size, config.hidden_dropout)
            saved += 8 * shape.sequence if self.has_position_table else 0
            # Row indices of this rank's vocabulary shard, or of tokens with those ahead of them.
            own_indices = shape.tp > 1 or self.num_predictions > 1
            saved += 8 * self.num_predictions * shape.gathered_tokens if own_indices else 0
        if stage.has_loss:
            saved += self.final_norm.saved_bytes(shape, shape.tokens)
            # The gradient of the output GEMM's input.
            saved += self.num_predictions * shape.activation_bytes(shape.gathered_tokens, config.hidden_size)
            if shape.fully_sharded:
                rows = padded_rows(self.vocab_size, config.make_vocab_size_divisible_by, shape.tp) // shape.tp
                saved += rows * config.hidden_size * shape.compute_bytes
        return saved


def decoder_spec(config: ModelConfig, moe: MoEConfig) -> DecoderSpec:
    """Makes the spec of a resolved config.

    >>> from petatron.config import load_config
    >>> run = load_config(["--vocab-size", "256", "--num-experts", "4"], preset="tiny-llama", require_training=False).config
    >>> spec = decoder_spec(run.model, run.moe)
    >>> type(spec.layers[0].channel_mixer).__name__, len(spec.layers) == run.model.num_layers
    ('MoESpec', True)
    """
    if config.hybrid_layer_pattern is not None:
        return hybrid_spec(config, moe, config.hybrid_layer_pattern)
    norm = norm_spec(config)
    mlp = mlp_spec(config, config.ffn_hidden_size)
    is_moe = moe_layers(RunConfig(model=config, moe=moe))
    experts = moe_spec(config, moe) if any(is_moe) else None

    def layer(mixer: BranchSpec, channel_mixer: BranchSpec) -> LayerSpec:
        return LayerSpec(
            mixer=mixer,
            channel_mixer=channel_mixer,
            norm=norm,
            dropout=config.hidden_dropout,
            norm_placement=config.norm_placement,
            residual_branches=config.residual_branches,
            residual_multiplier=config.residual_multiplier,
        )

    delta = delta_spec(config) if any(linear_layers(config)) else None
    mixers = (
        delta if linear and delta is not None else attention
        for linear, attention in zip(linear_layers(config), mixer_specs(config), strict=True)
    )
    channel_mixers = (experts if chosen and experts is not None else mlp for chosen in is_moe)
    layers = tuple(map(layer, mixers, channel_mixers))
    std = config.init_method_std
    layers += tuple(MtpLayerSpec.like(layers[-1], depth=k, std=std) for k in range(1, 1 + (config.mtp_num_layers or 0)))
    return DecoderSpec(config, None if experts is None else moe, layers, norm)


def hybrid_spec(config: ModelConfig, moe: MoEConfig, pattern: str) -> DecoderSpec:
    """Makes the spec of a model of layers with one branch each, by the letters of a pattern (hybrids)."""
    norm = norm_spec(config)
    attention = list(mixer_specs(config)) if ATTENTION in pattern else []
    others: dict[str, Callable[[], BranchSpec]] = {
        MAMBA: lambda: mamba2_spec(config),
        DELTA: lambda: delta_spec(config),
        MLP: lambda: mlp_spec(config, config.ffn_hidden_size),
        EXPERTS: lambda: moe_spec(config, moe),
    }
    made = {symbol: others[symbol]() for symbol in set(pattern) - {ATTENTION}}

    def layer(index: int, symbol: str) -> LayerSpec:
        branch = attention[index] if symbol == ATTENTION else made[symbol]
        mixes = symbol in (MAMBA, DELTA, ATTENTION)
        return LayerSpec(
            mixer=branch if mixes else None,
            channel_mixer=None if mixes else branch,
            norm=norm,
            dropout=config.hidden_dropout,
            norm_placement=config.norm_placement,
            residual_multiplier=config.residual_multiplier,
        )

    layers = tuple(layer(index, symbol) for index, symbol in enumerate(pattern))
    return DecoderSpec(config, moe if EXPERTS in pattern else None, layers, norm)


def norm_spec(config: ModelConfig, width: int | None = None) -> NormSpec:
    """Returns the norm of a config, over the hidden size unless another width is given."""
    return NormSpec(config.normalization, width or config.hidden_size, config.norm_epsilon, config.apply_layernorm_1p)


def mixer_specs(config: ModelConfig) -> Iterator[AttentionSpec | MlaSpec]:
    """Yields the mixer of every layer: some have a window, some no positions, and those with a window may have a rope of their own."""
    mixer = mla_spec(config) if config.multi_latent_attention else attention_spec(config)
    local_rope = mixer.rope
    if mixer.rope is not None and config.rotary_base_local is not None:
        local_rope = RopeSpec(rotary_dim=mixer.rope.rotary_dim, base=config.rotary_base_local)
    for has_window, has_no_rope in zip(window_layers(config), no_rope_layers(config), strict=True):
        rope = None if has_no_rope else local_rope if has_window else mixer.rope
        window = config.window_size if has_window else None
        if isinstance(mixer, AttentionSpec):
            rotates = rope is not None
            yield replace(
                mixer,
                window=window,
                rope=rope,
                chunk=mixer.chunk if rotates else None,
                temperature=None if rotates else mixer.temperature,
                qk_l2_norm=mixer.qk_l2_norm if rotates else None,
            )
        else:
            yield replace(mixer, window=window, rope=rope or mixer.rope)


def attention_spec(config: ModelConfig) -> AttentionSpec:
    head_dim = config.kv_channels
    return AttentionSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=head_dim,
        qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        out_bias=config.add_bias_linear,
        qk_norm=norm_spec(config, head_dim) if config.qk_layernorm else None,
        rope=rope_spec(config, head_dim) if config.position_embedding_type in ("rope", "yarn") else None,
        window=config.window_size,
        dropout=config.attention_dropout,
        std=config.init_method_std,
        out_std=out_std(config),
        qk_norm_scope=config.qk_layernorm_scope,
        rope_interleaved=config.rotary_interleaved,
        softmax_scale=config.softmax_scale,
        softcap=config.attn_logit_softcapping,
        sinks=_SINKS[config.softmax_type],
        chunk=config.attention_chunk_size,
        alibi=config.position_embedding_type == "alibi",
        temperature=attention_temperature(config),
        qk_l2_norm=config.norm_epsilon if config.qk_l2_norm else None,
        output_gate=config.attention_output_gate,
    )


def attention_temperature(config: ModelConfig) -> AttentionTemperature | None:
    scale = config.attention_temperature_scale
    return None if scale is None else AttentionTemperature(scale, config.attention_temperature_floor)


def mla_spec(config: ModelConfig) -> MlaSpec:
    return MlaSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_head_dim,
        v_dim=config.v_head_dim,
        rope=replace(rope_spec(config, config.qk_pos_emb_head_dim), rotary_dim=config.qk_pos_emb_head_dim),
        q_norm=norm_spec(config, config.q_lora_rank) if config.qk_layernorm and config.q_lora_rank else None,
        kv_norm=norm_spec(config, config.kv_lora_rank) if config.qk_layernorm else None,
        out_bias=config.add_bias_linear,
        window=config.window_size,
        dropout=config.attention_dropout,
        std=config.init_method_std,
        out_std=out_std(config),
    )


def mamba2_spec(config: ModelConfig) -> Mamba2Spec:
    return Mamba2Spec(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.mamba_num_groups,
        state_dim=config.mamba_state_dim,
        norm_groups=config.mamba_norm_groups,
        norm_eps=config.norm_epsilon,
        conv_width=MAMBA_CONV_WIDTH,
        chunk_size=config.mamba_chunk_size,
        std=config.init_method_std,
        out_std=out_std(config),
    )


def delta_spec(config: ModelConfig) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        hidden_size=config.hidden_size,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        norm_eps=config.norm_epsilon,
        conv_width=config.linear_conv_kernel_dim,
        chunk_size=config.linear_chunk_size,
        std=config.init_method_std,
        out_std=out_std(config),
    )


def out_std(config: ModelConfig) -> float:
    """Returns the initial standard deviation of the last GEMM of a branch; a layer of a hybrid has one branch, others two."""
    branches = 2 if config.hybrid_layer_pattern is None else 1
    return residual_std(config.init_method_std, config.num_layers, branches=branches)


def mlp_spec(config: ModelConfig, width: int) -> MLPSpec:
    return MLPSpec(
        hidden_size=config.hidden_size,
        width=width,
        activation=config.activation,
        bias=config.add_bias_linear,
        std=config.init_method_std,
        out_std=out_std(config),
        glu_bounds=glu_bounds(config),
    )


def glu_bounds(config: ModelConfig) -> GluBounds | None:
    bounds = GluBounds(config.activation_func_clamp_value, config.glu_linear_offset)
    return None if bounds == GluBounds() else bounds


def moe_spec(config: ModelConfig, moe: MoEConfig) -> MoESpec:
    shared = moe.moe_shared_expert_intermediate_size
    return MoESpec(
        hidden_size=config.hidden_size,
        num_experts=required("num_experts", moe.num_experts),
        width=required("moe_ffn_hidden_size", moe.moe_ffn_hidden_size),
        latent_size=moe.moe_latent_size,
        shared=mlp_spec(config, shared) if shared else None,
        shared_gate=bool(shared) and moe.moe_shared_expert_gate,
        activation=config.activation,
        bias=config.add_bias_linear,
        routing=moe,
        std=config.init_method_std,
        out_std=out_std(config),
        glu_bounds=glu_bounds(config),
    )
