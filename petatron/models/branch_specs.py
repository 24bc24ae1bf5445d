"""Builds the specs of a decoder's residual branches (attention, MLP, MoE, Mamba-2, ...) from the settings of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from petatron.config.required_settings import required
from petatron.config.schema.attention_layer_freq import no_rope_layers, window_layers
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.hybrid import branch_symbols
from petatron.config.schema.sections.mamba2 import MAMBA_CONV_WIDTH
from petatron.config.schema.sections.rope import parse_longrope_factors
from petatron.config.schema.sections.sparse_attention import has_sparse_attention
from petatron.kernels.activation import GluVariant
from petatron.kernels.attention.visibility import DistanceBias, Visibility
from petatron.layers.alibi_and_temperature import AttentionTemperature
from petatron.layers.attention import AttentionSpec
from petatron.layers.mla import MlaSpec
from petatron.layers.mlp import MLPSpec
from petatron.layers.moe.moe_layer import MoESpec
from petatron.layers.norm import NormSpec
from petatron.layers.rope import RopeSpec
from petatron.layers.sparse_attention_indexer import IndexerSpec
from petatron.layers.sparse_mla import SparseMlaSpec
from petatron.layers.spec.branch_spec import BranchSpec, residual_std
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.layers.ssm.kimi_delta_attention import KimiDeltaSpec
from petatron.layers.ssm.lightning_attention import LightningSpec
from petatron.layers.ssm.mamba2 import Mamba2Spec
from petatron.layers.transformer_layer import LayerSpec

_BIASES: Mapping[str, DistanceBias] = {"alibi": "alibi", "relative": "relative"}
_SINKS: Mapping[str, Literal["learned", "zero"]] = {"off-by-one": "zero", "learnable": "learned"}


def plain_layer(config: ModelConfig) -> LayerSpec:
    """Makes what all layers have in common, to which each adds its branches."""
    return LayerSpec(
        mixer=None,
        channel_mixer=None,
        norm=norm_spec(config),
        dropout=config.hidden_dropout,
        norm_placement=config.norm_placement,
        residual_branches=config.residual_branches,
        residual_multiplier=config.residual_multiplier,
        stream_multipliers=(
            (AttentionSpec.name, config.attention_stream_multiplier),
            (LightningSpec.name, config.lightning_stream_multiplier),
            (MLPSpec.name, config.mlp_stream_multiplier),
        ),
    )


def norm_spec(config: ModelConfig, width: int | None = None) -> NormSpec:
    """Returns the norm of a config, over the hidden size unless another width is given."""
    width, kind = width or config.hidden_size, config.normalization
    return NormSpec(kind, width, config.norm_epsilon, config.apply_layernorm_1p, config.norm_bias)


def attention_specs(config: ModelConfig) -> Iterator[AttentionSpec | MlaSpec]:
    """Yields the mixer of every layer: some have a window, some no positions, and those with a window may have a rope of their own."""
    if has_sparse_attention(config):
        mixer = sparse_mla_spec(config)
    else:
        mixer = MlaSpec(**_latent_sizes(config)) if config.multi_latent_attention else attention_spec(config)
    local_rope = mixer.rope
    if mixer.rope is not None and config.rotary_base_local is not None:
        local_rope = RopeSpec(rotary_dim=mixer.rope.rotary_dim, base=config.rotary_base_local)
    for has_window, has_no_rope in zip(window_layers(config), no_rope_layers(config), strict=True):
        rope = None if has_no_rope else local_rope if has_window else mixer.rope
        visibility = replace(mixer.visibility, window=config.window_size if has_window else None)
        if isinstance(mixer, AttentionSpec):
            rotates = rope is not None
            yield replace(
                mixer,
                visibility=visibility if rotates else replace(visibility, chunk=None),
                rope=rope,
                temperature=None if rotates else mixer.temperature,
                qk_l2_norm=mixer.qk_l2_norm if rotates else None,
            )
        else:
            yield replace(mixer, visibility=visibility, rope=rope or mixer.rope)


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """Makes attention's spec.

    Factors on its input and on keys become one on scores and one on the output: what stands between is refused
    (`validate/layer_kinds.py`).
    """
    head_dim, factor = config.kv_channels, config.attention_in_multiplier
    scores = factor * factor * config.key_multiplier
    softmax_scale, temperature = config.softmax_scale, config.attention_temperature_scale
    if scores != 1.0:
        softmax_scale = scores * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
    return AttentionSpec(
        **_stream(config),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=head_dim,
        qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        out_bias=config.add_bias_linear,
        qk_norm=norm_spec(config, head_dim) if config.qk_layernorm else None,
        rope=rope_spec(config, head_dim) if config.position_embedding_type in ("rope", "yarn") else None,
        visibility=Visibility(
            window=config.window_size,
            chunk=config.attention_chunk_size,
            bias=_BIASES.get(config.position_embedding_type),
        ),
        dropout=config.attention_dropout,
        qk_norm_scope=config.qk_layernorm_scope,
        rope_interleaved=config.rotary_interleaved,
        qkv_clip=config.clip_qkv,
        softmax_scale=softmax_scale,
        softcap=config.attn_logit_softcapping,
        sinks=_SINKS.get(config.softmax_type),
        temperature=None
        if temperature is None
        else AttentionTemperature(temperature, config.attention_temperature_floor),
        qk_l2_norm=config.norm_epsilon if config.qk_l2_norm else None,
        output_gate=config.attention_output_gate,
        output_multiplier=factor * config.attention_out_multiplier,
    )


def sparse_mla_spec(config: ModelConfig) -> SparseMlaSpec:
    eps, width = config.dsa_indexer_k_norm_epsilon, config.dsa_indexer_head_dim
    indexer = IndexerSpec(
        hidden_size=config.hidden_size,
        q_input_size=config.q_lora_rank or config.hidden_size,
        num_heads=config.dsa_indexer_n_heads,
        head_dim=width,
        topk=config.dsa_indexer_topk,
        rope_interleaved=config.dsa_indexer_rope_interleaved,
        rotates=config.dsa_indexer_rotate_activation,
        relu=config.dsa_indexer_scoring_relu,
        k_norm=NormSpec("LayerNorm", width, config.norm_epsilon if eps is None else eps),
        std=config.init_method_std,
        loss_coeff=config.dsa_indexer_loss_coeff,
        sparse_loss=config.dsa_indexer_use_sparse_loss,
    )
    return SparseMlaSpec(**_latent_sizes(config), indexer=indexer)


def _latent_sizes(config: ModelConfig) -> dict[str, Any]:
    return dict(
        **_stream(config),
        num_heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_head_dim,
        v_dim=config.v_head_dim,
        rotary_dim=config.qk_pos_emb_head_dim,
        rope=latent_rope_spec(config),
        q_norm=latent_norm_spec(config, config.q_lora_rank) if config.q_lora_rank else None,
        kv_norm=latent_norm_spec(config, config.kv_lora_rank),
        out_bias=config.add_bias_linear,
        visibility=Visibility(window=config.window_size),
        dropout=config.attention_dropout,
    )


def latent_norm_spec(config: ModelConfig, width: int) -> NormSpec | None:
    """Returns the norm of a latent; None: latents are not normalized."""
    if not config.qk_layernorm:
        return None
    norm, eps = norm_spec(config, width), config.latent_norm_epsilon
    return norm if eps is None else replace(norm, eps=eps)


def latent_rope_spec(config: ModelConfig) -> RopeSpec | None:
    """Returns how the rotary part of latent attention's heads is rotated, which is all of it; None: positions do not enter."""
    if config.position_embedding_type not in ("rope", "yarn"):
        return None
    width = config.qk_pos_emb_head_dim
    return replace(rope_spec(config, width), rotary_dim=width)


def mamba2_spec(config: ModelConfig) -> Mamba2Spec:
    multipliers = tuple(config.ssm_in_multiplier * factor for factor in config.ssm_multipliers)
    return Mamba2Spec(
        **_stream(config),
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        num_groups=config.mamba_num_groups,
        state_dim=config.mamba_state_dim,
        norm_groups=config.mamba_norm_groups,
        norm_eps=config.norm_epsilon,
        conv_width=MAMBA_CONV_WIDTH,
        chunk_size=config.mamba_chunk_size,
        output_gate=config.mamba_gated_norm,
        multipliers=None if set(multipliers) == {1.0} else multipliers,
        output_multiplier=config.ssm_out_multiplier,
    )


def delta_spec(config: ModelConfig, kind: type[GatedDeltaNetSpec] = GatedDeltaNetSpec) -> GatedDeltaNetSpec:
    return kind(
        **_stream(config),
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        norm_eps=config.norm_epsilon,
        conv_width=config.linear_conv_kernel_dim,
        chunk_size=config.linear_chunk_size,
    )


def lightning_spec(config: ModelConfig) -> LightningSpec:
    return LightningSpec(
        **_stream(config),
        num_heads=config.num_attention_heads,
        head_dim=config.kv_channels,
        num_layers=config.num_layers,
        chunk_size=config.linear_chunk_size,
        output_multiplier=config.lightning_out_multiplier,
    )


LINEAR_ATTENTION: Mapping[str, Callable[[ModelConfig], BranchSpec]] = {
    "gated_delta_net": delta_spec,
    "kimi_delta_attention": partial(delta_spec, kind=KimiDeltaSpec),
    "lightning_attention": lightning_spec,
}
"""What makes the spec of each `--experimental-attention-variant`."""


def out_std(config: ModelConfig) -> float:
    """Returns the initial standard deviation of the last GEMM of a branch; a hybrid's pattern says how many there are, else two a layer."""
    pattern = config.hybrid_layer_pattern
    layers, branches = (config.num_layers, 2) if pattern is None else (len(branch_symbols(pattern)), 1)
    return residual_std(config.init_method_std, layers, branches=branches)


def _stream(config: ModelConfig) -> dict[str, Any]:
    """Returns the width of the residual stream, and the initial standard deviations of GEMMs that read it and write to it."""
    return {"hidden_size": config.hidden_size, "std": config.init_method_std, "out_std": out_std(config)}


def mlp_spec(config: ModelConfig, width: int) -> MLPSpec:
    return MLPSpec(
        **_stream(config),
        width=width,
        activation=config.activation,
        bias=config.add_bias_linear,
        glu_variant=glu_variant(config),
        output_multiplier=config.mlp_multipliers[-1],
    )


def glu_variant(config: ModelConfig) -> GluVariant | None:
    variant = GluVariant(config.activation_func_clamp_value, config.glu_linear_offset, config.mlp_multipliers[0])
    return None if variant == GluVariant() else variant


def moe_spec(config: ModelConfig, moe: MoEConfig) -> MoESpec:
    shared = moe.moe_shared_expert_intermediate_size
    return MoESpec(
        **_stream(config),
        num_experts=required("num_experts", moe.num_experts),
        width=required("moe_ffn_hidden_size", moe.moe_ffn_hidden_size),
        latent_size=moe.moe_latent_size,
        shared=mlp_spec(config, shared) if shared else None,
        shared_gate=bool(shared) and moe.moe_shared_expert_gate,
        activation=config.activation,
        bias=config.add_bias_linear,
        routing=moe,
        glu_variant=glu_variant(config),
        output_multiplier=config.mlp_multipliers[-1],
    )


def rope_spec(config: ModelConfig, head_dim: int) -> RopeSpec:
    """Returns the rope of heads of a width, scaled as the settings say."""
    yarn = config.position_embedding_type == "yarn"
    short, long = config.longrope_short_factor, config.longrope_long_factor
    width, base = int(head_dim * config.rotary_percent), config.rotary_base
    plain = RopeSpec(rotary_dim=width, base=base, axes=config.mrope_section)
    interpolation = config.rotary_seq_len_interpolation_factor
    if interpolation is not None and not yarn:
        return replace(plain, scaling="linear", scaling_factor=interpolation)
    factor, context = config.rope_scaling_factor, config.original_max_position_embeddings
    scaled = replace(plain, scaling_factor=factor, original_context=context)
    if short is not None and long is not None:
        return replace(
            scaled,
            scaling="longrope",
            divisors=parse_longrope_factors(short),
            long_divisors=parse_longrope_factors(long),
            attention_factor=config.longrope_attention_factor,
        )
    return replace(
        scaled,
        scaling="yarn" if yarn else "llama3" if config.use_rope_scaling else None,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.yarn_mscale,
        mscale_all_dim=config.yarn_mscale_all_dim,
        round_ramp=config.yarn_correction_range_round_to_int,
    )
