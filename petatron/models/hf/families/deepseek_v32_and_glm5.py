"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention, whose indexer is a module of attention.

Rotary pairs of the indexer are half of the rotated part apart in DeepSeek-V3.2, and neighbors in GLM-5. transformers leaves out the
Hadamard rotation, which changes no score. In GLM-5.2 some layers have no indexer and take what the layer before has chosen
(`indexer_types`): such a model is refused.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.models.hf import moe_config_json as moe
from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import latent_attention, llama, no_biases, predictions
from petatron.models.hf.families.deepseek import (
    EXPERT_BIAS_MAPPING,
    LATENT_MAPPINGS,
    MTP_COPIES,
    MTP_MAPPINGS,
    SHARED_EXPERTS,
    check_head_dim,
    latent_decoder,
)
from petatron.models.hf.family import Family
from petatron.models.hf.rope_config_json import rope

_INDEXER = {"q_up": "wq_b", "k": "wk", "k_norm": "k_norm", "head_weights": "weights_proj"}
_MAPPINGS = (
    *LATENT_MAPPINGS,
    *tables.module_mappings("layers.*.attention.indexer", "model.layers.*.self_attn.indexer", _INDEXER),
    *SHARED_EXPERTS,
    *MTP_MAPPINGS,
    EXPERT_BIAS_MAPPING,
)
_EPSILON = 1e-6


def _sparse_attention(config: Translation, *, heads: int) -> None:
    config.copy("dsa_indexer_n_heads", "index_n_heads", heads)
    config.copy("dsa_indexer_head_dim", "index_head_dim", 128)
    config.copy("dsa_indexer_topk", "index_topk", 2048)
    config.always(experimental_attention_variant="dsa", dsa_indexer_scoring_relu=True)
    config.convert(("dsa_indexer_rotate_activation",), _rotates)
    config.convert((), check_head_dim)


def _experts(config: Translation, *, groups: int, top_groups: int) -> None:
    moe.expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(256, 8, 2048))
    moe.sigmoid_router(config)
    config.only(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True)
    routing = {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": groups, "topk_group": top_groups}
    moe.deepseek_routing(config, 2, **routing)
    moe.experts_after_dense_layers(config, 3, mlp_layer_types=None)


def _deepseek_v32(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts")
    latent_decoder(config, max_position_embeddings=163840)
    config.only(mlp_bias=False)
    _sparse_attention(config, heads=64)
    config.always(dsa_indexer_rope_interleaved=False, dsa_indexer_k_norm_epsilon=None)
    predictions(config)
    _experts(config, groups=8, top_groups=4)


def _glm_moe_dsa(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts")
    latent_attention(config, q_lora_rank=2048)
    llama(config, without=("head_dim",), max_position_embeddings=202752, rms_norm_eps=1e-5)
    no_biases(config)
    config.always(qk_layernorm=True, latent_norm_epsilon=_EPSILON, dsa_indexer_k_norm_epsilon=_EPSILON)
    config.only(attention_bias=False, mlp_bias=False, moe_layer_freq=1)
    rope(config)
    _sparse_attention(config, heads=32)
    config.always(dsa_indexer_rope_interleaved=True)
    config.only(indexer_rope_interleave=True)
    config.convert((), _every_layer_has_an_indexer, indexer_types=None, index_topk_freq=1, index_topk_pattern=None)
    predictions(config)
    _experts(config, groups=1, top_groups=1)


def _rotates(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Rotates heads whose width has a Hadamard matrix: scores are the same with and without."""
    width = keys["index_head_dim"]
    return {"dsa_indexer_rotate_activation": width & (width - 1) == 0}, []


def _every_layer_has_an_indexer(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Of the three keys that say which layers have one, `indexer_types` counts first, then the pattern."""
    rule = "lets layers take what another one has chosen, and every layer of the decoder has an indexer"
    kinds, pattern, freq = (keys[key] for key in ("indexer_types", "index_topk_pattern", "index_topk_freq"))
    if kinds is not None:
        key, shares = "indexer_types", not isinstance(kinds, list) or any(kind != "full" for kind in kinds)
    elif pattern is not None:
        full = ("F", "full")
        key, shares = "index_topk_pattern", any(kind not in full for kind in pattern)
    else:
        key, shares = "index_topk_freq", freq not in (None, 0, 1)
    return {}, [Problem(key, f"{keys[key]!r:.40}", rule, OTHER_MODEL_FIX)] if shares else []


DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    models="DeepSeek-V3.2",
    what_differs="DeepSeek-V3 with [sparse attention](mla.md#sparse-attention): an indexer chooses the tokens of each query",
    architecture="DeepseekV32ForCausalLM",
    mappings=(*_MAPPINGS, *tables.SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *tables.FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    translate=_deepseek_v32,
)
GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    models="GLM-5",
    what_differs="DeepSeek-V3.2 without groups of experts, rotary pairs of the indexer being neighbors",
    architecture="GlmMoeDsaForCausalLM",
    mappings=(*_MAPPINGS, *tables.SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *tables.FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    translate=_glm_moe_dsa,
)
