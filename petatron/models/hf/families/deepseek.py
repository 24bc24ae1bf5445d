"""DeepSeek-V2 and V3 (Kimi-K2 is a V3): latent attention, dense layers before those with experts, shared experts without a gate.

V2 takes a softmax over all experts, ranks groups of them by their best one, and does not normalise the weights of the chosen: our
routing with `moe_router_pre_softmax`. V3 takes sigmoids, chooses with a bias per expert that is no part of the weights (a buffer of the
model, `e_score_correction_bias`), ranks groups by their best two, and divides the chosen weights by their sum. Both compute the router
in float32, and both normalise latents with an epsilon of 1e-6 whatever `rms_norm_eps` says.

Rotary pairs are neighbours in these weights, as in ours (`layers/mla.py`).

V3's folders have depths of multi-token prediction as layers after the last, with copies of embedding and head. transformers does not load
them with the model and leaves them out where it saves one, although its config.json still counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import (
    EXPERTS,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_MAPPINGS,
)

SHARED_EXPERTS = (
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping(("layers.*.mlp.shared.gate",), "model.layers.*.mlp.shared_experts.gate_proj"),
    ModuleMapping(("layers.*.mlp.shared.up",), "model.layers.*.mlp.shared_experts.up_proj"),
    ModuleMapping(("layers.*.mlp.shared.down",), "model.layers.*.mlp.shared_experts.down_proj"),
)
_NOT_IN_LATENT_ATTENTION = ("layers.*.attention.q_norm",)  # here the norm of a latent, under another name
LATENT_MAPPINGS = (
    *(row for row in LLAMA_MAPPINGS if row.logical_modules != _NOT_IN_LATENT_ATTENTION),
    ModuleMapping(("layers.*.attention.q_down",), "model.layers.*.self_attn.q_a_proj"),
    ModuleMapping(("layers.*.attention.q_norm",), "model.layers.*.self_attn.q_a_layernorm"),
    ModuleMapping(("layers.*.attention.q_up",), "model.layers.*.self_attn.q_b_proj"),
    ModuleMapping(("layers.*.attention.kv_down",), "model.layers.*.self_attn.kv_a_proj_with_mqa"),
    ModuleMapping(("layers.*.attention.kv_norm",), "model.layers.*.self_attn.kv_a_layernorm"),
    ModuleMapping(("layers.*.attention.kv_up",), "model.layers.*.self_attn.kv_b_proj"),
)
_MAPPINGS = (*LATENT_MAPPINGS, *SHARED_EXPERTS)
MTP_MAPPINGS = (
    ModuleMapping(("layers.*.embedding_norm",), "model.layers.*.enorm"),
    ModuleMapping(("layers.*.hidden_norm",), "model.layers.*.hnorm"),
    ModuleMapping(("layers.*.projection",), "model.layers.*.eh_proj"),
    ModuleMapping(("layers.*.norm",), "model.layers.*.shared_head.norm"),
)
# Copies of the embedding and the head, which depths of multi-token prediction share.
MTP_COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")
EXPERT_BIAS_MAPPING = ModuleMapping(
    ("layers.*.mlp.router",),
    "model.layers.*.mlp.gate.e_score_correction_bias",
    no_weight_suffix=True,
    leaf="expert_bias",
)
SEPARATE_EXPERTS = (
    ModuleMapping((f"{EXPERTS}.gate",), "model.layers.*.mlp.experts.#.gate_proj"),
    ModuleMapping((f"{EXPERTS}.up",), "model.layers.*.mlp.experts.#.up_proj"),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.#.down_proj"),
)
FUSED_EXPERTS = (
    ModuleMapping(
        (f"{EXPERTS}.gate", f"{EXPERTS}.up"), "model.layers.*.mlp.experts.gate_up_proj", no_weight_suffix=True
    ),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.down_proj", no_weight_suffix=True),
)
LATENT_KEYS = {
    **{ours: key for ours, key in LLAMA_KEYS.items() if ours not in ("kv_channels", "norm_epsilon")},
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_DEFAULTS = {
    **{key: value for key, value in LLAMA_DEFAULTS.items() if key != "head_dim"},
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 0,
}
_FIXED = {
    **LLAMA_FIXED,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "norm_epsilon": 1e-6,
}
_SINGLE_VALUES = {"attention_bias": False, "rms_norm_eps": 1e-6, "moe_layer_freq": 1}
V3_MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_ROUTER_FIXED = {"moe_shared_expert_gate": False, "moe_router_dtype": "fp32"}
V3_ROUTER_FIXED = {
    **_ROUTER_FIXED,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
}
_NO_LATENT = {"moe_latent_size": None}
V3_MOE_FIXED = {**V3_ROUTER_FIXED, **_NO_LATENT}


def _check_head_dim(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """`head_dim` is that of the rotary part in transformers, which computes frequencies by it where a file has one."""
    given, rotary = hf_config.get("head_dim"), hf_config["qk_rope_head_dim"]
    if given in (None, rotary):
        return {}, []
    rule = f"is not qk_rope_head_dim {rotary}, the width by which transformers computes rotary frequencies"
    return {}, [Problem("head_dim", f"{given!r:.40}", rule, "Remove it.")]


DEEPSEEK_V2 = like_llama(
    name="deepseek_v2",
    models="DeepSeek-V2, V2-Lite",
    what_differs="[latent attention](mla.md), shared experts, dense layers first, groups of experts ranked by their best",
    architecture="DeepseekV2ForCausalLM",
    mappings=(*_MAPPINGS, *SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *FUSED_EXPERTS),
    keys=LATENT_KEYS,
    defaults={
        **_DEFAULTS,
        "mlp_bias": False,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    fixed=_FIXED,
    aliases={"n_routed_experts": "num_experts"},
    single_values={**_SINGLE_VALUES, "mlp_bias": False, "scoring_func": "softmax", "norm_topk_prob": False},
    heads_divide_width=True,
    moe_keys=V3_MOE_KEYS,
    moe_fixed={
        **_ROUTER_FIXED,
        **_NO_LATENT,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": False,
    },
    group_score_topk=1,
)
DEEPSEEK_V3 = like_llama(
    name="deepseek_v3",
    models="DeepSeek-V3, R1, Kimi-K2 (`kimi_k2`)",
    what_differs="the same with sigmoid scores, groups ranked by their best two, a bias per expert",
    other_names=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    mappings=(*_MAPPINGS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING, *SEPARATE_EXPERTS),
    in_memory_mappings=(*_MAPPINGS, *MTP_MAPPINGS, EXPERT_BIAS_MAPPING, *FUSED_EXPERTS),
    ignored_tensors=("*rotary_emb.inv_freq", *MTP_COPIES),
    mtp_keys=("num_nextn_predict_layers", "num_mtp_layers"),
    keys=LATENT_KEYS,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "norm_topk_prob": True,
    },
    fixed=_FIXED,
    aliases={"n_routed_experts": "num_local_experts"},
    read_more=_check_head_dim,
    single_values={
        **_SINGLE_VALUES,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "norm_topk_prob": True,
    },
    moe_keys=V3_MOE_KEYS,
    moe_fixed=V3_MOE_FIXED,
    group_score_topk=2,
)
