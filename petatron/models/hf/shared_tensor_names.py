"""Tensor-name mappings that several Hugging Face families share: those of Llama, and of experts."""

from __future__ import annotations

from collections.abc import Mapping

from petatron.models.hf.family import ModuleMapping

ATTENTION: Mapping[str, str] = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
GATED_MLP: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
QKV = ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v")
EXPERTS = "layers.*.mlp.experts"


def module_mappings(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of modules by their names inside a module of ours and of theirs.

    >>> [mapping.hf_module for mapping in module_mappings("layers.*.mlp", "model.layers.*.mlp", GATED_MLP)][0]
    'model.layers.*.mlp.gate_proj'
    """
    return tuple(ModuleMapping((f"{ours}.{name}",), f"{theirs}.{hf_name}") for name, hf_name in names.items())


def leaf_mappings(ours: str, theirs: str, *leaves: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of tensors that are no weight or bias of a module, and have the same name in both."""
    return tuple(ModuleMapping((ours,), f"{theirs}.{leaf}", no_weight_suffix=True, leaf=leaf) for leaf in leaves)


def fused_experts(theirs: str, *, transposed: bool = False) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of all experts of a layer as two tensors, of which the first is gate and up."""
    names = {(f"{EXPERTS}.gate", f"{EXPERTS}.up"): "gate_up_proj", (f"{EXPERTS}.down",): "down_proj"}
    return tuple(
        ModuleMapping(ours, f"{theirs}.{name}", transposed=transposed, no_weight_suffix=True)
        for ours, name in names.items()
    )


LLAMA_MAPPINGS = (
    ModuleMapping(("embedding",), "model.embed_tokens"),
    ModuleMapping(("layers.*.attention_norm",), "model.layers.*.input_layernorm"),
    *module_mappings("layers.*.attention", "model.layers.*.self_attn", ATTENTION),
    *module_mappings("layers.*.attention", "model.layers.*.self_attn", {"q_norm": "q_norm", "k_norm": "k_norm"}),
    ModuleMapping(("layers.*.mlp_norm",), "model.layers.*.post_attention_layernorm"),
    *module_mappings("layers.*.mlp", "model.layers.*.mlp", GATED_MLP),
    ModuleMapping(("norm",), "model.norm"),
    ModuleMapping(("head",), "lm_head"),
    ModuleMapping(("task_head.out",), "score"),
)
ROUTER_MAPPING = ModuleMapping(("layers.*.mlp.router",), "model.layers.*.mlp.gate")
SEPARATE_EXPERTS = module_mappings(EXPERTS, "model.layers.*.mlp.experts.#", GATED_MLP)
# transformers 5 fuses the experts of a layer when it loads a model: in memory they are one tensor, gate and up fused.
FUSED_EXPERTS = fused_experts("model.layers.*.mlp.experts")
FUSED_EXPERT_MAPPINGS = (*LLAMA_MAPPINGS, ROUTER_MAPPING, *FUSED_EXPERTS)
SEPARATE_EXPERT_MAPPINGS = (*LLAMA_MAPPINGS, ROUTER_MAPPING, *SEPARATE_EXPERTS)


def llama_mappings_without(*modules: str) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of a Llama but for these modules of ours, which a family has under other names or not at all."""
    return tuple(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules[0] not in modules)
