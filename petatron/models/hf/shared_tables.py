"""Names of tensors that families have in common: those of Llama, and of experts."""

from __future__ import annotations

from petatron.models.hf.family import ModuleMapping

LLAMA_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    ModuleMapping(("layers.*.attention_norm",), "model.layers.*.input_layernorm"),
    ModuleMapping(("layers.*.attention.q",), "model.layers.*.self_attn.q_proj"),
    ModuleMapping(("layers.*.attention.k",), "model.layers.*.self_attn.k_proj"),
    ModuleMapping(("layers.*.attention.v",), "model.layers.*.self_attn.v_proj"),
    ModuleMapping(("layers.*.attention.q_norm",), "model.layers.*.self_attn.q_norm"),
    ModuleMapping(("layers.*.attention.k_norm",), "model.layers.*.self_attn.k_norm"),
    ModuleMapping(("layers.*.attention.out",), "model.layers.*.self_attn.o_proj"),
    ModuleMapping(("layers.*.mlp_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.gate",), "model.layers.*.mlp.gate_proj"),
    ModuleMapping(("layers.*.mlp.up",), "model.layers.*.mlp.up_proj"),
    ModuleMapping(("layers.*.mlp.down",), "model.layers.*.mlp.down_proj"),
    ModuleMapping(("norm",), "model.norm"),
    ModuleMapping(("head",), "lm_head"),
)

EXPERTS = "layers.*.mlp.experts"
# transformers 5 fuses the experts of a layer when it loads a model: in memory they are one tensor, gate and up fused.
FUSED_EXPERT_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping(
        (f"{EXPERTS}.gate", f"{EXPERTS}.up"), "model.layers.*.mlp.experts.gate_up_proj", no_weight_suffix=True
    ),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.down_proj", no_weight_suffix=True),
)
SEPARATE_EXPERT_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate"),
    ModuleMapping((f"{EXPERTS}.gate",), "model.layers.*.mlp.experts.#.gate_proj"),
    ModuleMapping((f"{EXPERTS}.up",), "model.layers.*.mlp.experts.#.up_proj"),
    ModuleMapping((f"{EXPERTS}.down",), "model.layers.*.mlp.experts.#.down_proj"),
)
