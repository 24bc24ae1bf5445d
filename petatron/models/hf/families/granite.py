"""Granite: a Llama with factors on embeddings, residuals, attention scores and logits; dense, and with experts in every layer.

The experts of a layer are two fused tensors, under one name in files and another in memory. Their
weights are the softmax over the chosen logits.
"""

from __future__ import annotations

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import biases, llama, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_in_every_layer, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import EXPERTS, LLAMA_MAPPINGS, fused_experts

_MOE = "model.layers.*.block_sparse_moe"
EXPERTS_IN_FILES = (
    ModuleMapping(("layers.*.mlp.router",), f"{_MOE}.router.layer"),
    ModuleMapping((f"{EXPERTS}.gate", f"{EXPERTS}.up"), f"{_MOE}.input_linear"),
    ModuleMapping((f"{EXPERTS}.down",), f"{_MOE}.output_linear"),
)
EXPERTS_IN_MEMORY = (
    ModuleMapping(("layers.*.mlp.router",), f"{_MOE}.router"),
    *fused_experts(f"{_MOE}.experts"),
)


def multipliers(config: Translation) -> None:
    """Translates Granite's factors."""
    config.copy_same(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)
    config.copy("softmax_scale", "attention_multiplier", 1.0, needed=True)


def _granite(config: Translation) -> None:
    llama(config, without=("head_dim",))
    multipliers(config)
    biases(config)
    rope(config)


def _granite_moe(config: Translation) -> None:
    llama(config, without=("head_dim",))
    multipliers(config)
    no_biases(config)
    config.only(attention_bias=False)
    rope(config)
    expert_sizes(config)
    softmax_router(config)
    experts_in_every_layer(config)


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    what_differs="factors on embeddings, residuals, scores and logits",
    mappings=LLAMA_MAPPINGS,
    translate=_granite,
)
GRANITE_MOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    models="Granite 3 MoE",
    what_differs="Granite's factors, experts in every layer",
    mappings=(*LLAMA_MAPPINGS, *EXPERTS_IN_FILES),
    in_memory_mappings=(*LLAMA_MAPPINGS, *EXPERTS_IN_MEMORY),
    translate=_granite_moe,
)
