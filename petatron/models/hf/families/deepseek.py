"""DeepSeek-V2 and V3 (Kimi-K2 is a V3): latent attention, dense layers before those with experts, shared experts without a gate.

V2 takes a softmax over all experts, ranks groups of them by their best one, and does not normalize the weights of the chosen: our
routing with `moe_router_pre_softmax`. V3 takes sigmoids, chooses with a bias per expert that is no part of the weights (a buffer of the
model, `e_score_correction_bias`), ranks groups by their best two, and divides the chosen weights by their sum. Both compute the router
in float32, and both normalize latents with an epsilon of 1e-6 whatever `rms_norm_eps` says.

Rotary pairs are neighbors in these weights, as in ours (`layers/mla.py`).

V3's folders have depths of multi-token prediction as layers after the last, with copies of embedding and head. transformers does not load
them with the model and leaves them out where it saves one, although its config.json still counts them.
"""

from __future__ import annotations

from petatron.base.errors import Problem
from petatron.models.hf import moe_config_json as moe
from petatron.models.hf import shared_tensor_names as tables
from petatron.models.hf.config_translation import REQUIRED, Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import latent_attention, llama, no_biases, predictions
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope

SHARED_EXPERTS = (
    tables.ROUTER_MAPPING,
    *tables.module_mappings("layers.*.mlp.shared", "model.layers.*.mlp.shared_experts", tables.GATED_MLP),
)
_LATENTS = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
LATENT_MAPPINGS = (
    *tables.llama_mappings_without("layers.*.attention.q_norm"),  # here the norm of a latent, under another name
    *tables.module_mappings("layers.*.attention", "model.layers.*.self_attn", _LATENTS),
)
_MAPPINGS = (*LATENT_MAPPINGS, *SHARED_EXPERTS)
_MTP = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
MTP_MAPPINGS = tables.module_mappings("layers.*", "model.layers.*", _MTP)
# Copies of the embedding and the head, which depths of multi-token prediction share.
MTP_COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")
EXPERT_BIAS_MAPPING = ModuleMapping(
    ("layers.*.mlp.router",),
    "model.layers.*.mlp.gate.e_score_correction_bias",
    no_weight_suffix=True,
    leaf="expert_bias",
)


def latent_decoder(
    config: Translation,
    *,
    q_lora_rank: int = 1536,
    max_position_embeddings: int = 2048,
    heads_divide_width: bool = False,
) -> None:
    """Translates all but experts, of models whose norms have an epsilon of 1e-6."""
    latent_attention(config, q_lora_rank=q_lora_rank)
    llama(
        config,
        without=("head_dim", "rms_norm_eps"),
        max_position_embeddings=max_position_embeddings,
        heads_divide_width=heads_divide_width,
    )
    no_biases(config)
    config.always(qk_layernorm=True, norm_epsilon=1e-6)
    config.only(attention_bias=False, rms_norm_eps=1e-6, moe_layer_freq=1)
    rope(config)


def _deepseek_v2(config: Translation) -> None:
    config.also(n_routed_experts="num_experts")
    latent_decoder(config, heads_divide_width=True)
    moe.expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(64, REQUIRED, 1407))
    moe.sigmoid_router(config)
    config.always(moe_router_score_function="softmax", moe_router_pre_softmax=True, moe_router_enable_expert_bias=False)
    config.only(mlp_bias=False, scoring_func="softmax", norm_topk_prob=False)
    routing = {"n_shared_experts": 2, "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None}
    moe.deepseek_routing(config, 1, topk_method="greedy", **routing)
    moe.experts_after_dense_layers(config, 0)


def _deepseek_v3(config: Translation) -> None:
    config.also(n_routed_experts="num_local_experts")
    latent_decoder(config, max_position_embeddings=4096)
    config.convert((), check_head_dim)
    predictions(config)
    moe.expert_sizes(config, "n_routed_experts", width="moe_intermediate_size", defaults=(256, 8, 2048))
    moe.sigmoid_router(config)
    config.only(topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True, norm_topk_prob=True)
    moe.deepseek_routing(config, 2, n_shared_experts=1, routed_scaling_factor=2.5, n_group=8, topk_group=4)
    moe.experts_after_dense_layers(config, 3)


def check_head_dim(keys: Keys) -> tuple[Settings, list[Problem]]:
    """`head_dim` is that of the rotary part in transformers, which computes frequencies by it where a file has one."""
    given, rotary = keys.get("head_dim"), keys["qk_rope_head_dim"]
    if given in (None, rotary):
        return {}, []
    rule = f"is not qk_rope_head_dim {rotary}, the width by which transformers computes rotary frequencies"
    return {}, [Problem("head_dim", f"{given!r:.40}", rule, "Remove it.")]


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    models="DeepSeek-V2, V2-Lite",
    what_differs="[latent attention](mla.md), shared experts, dense layers first, groups of experts ranked by their best",
    architecture="DeepseekV2ForCausalLM",
    mappings=(*_MAPPINGS, *tables.SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *tables.FUSED_EXPERTS),
    translate=_deepseek_v2,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    models="DeepSeek-V3, R1, Kimi-K2 (`kimi_k2`)",
    what_differs="the same with sigmoid scores, groups ranked by their best two, a bias per expert",
    other_names=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    mappings=(*_MAPPINGS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING, *tables.SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING, *tables.FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    translate=_deepseek_v3,
)
