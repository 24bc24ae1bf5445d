"""Mistral (a sliding window in every layer), Ministral (in some layers) and Mixtral (experts in every layer, under names of their own).

Mixtral computes a softmax over all experts, chooses the top K of it and divides the chosen weights by their sum. The result is the
softmax over the chosen logits, which is our routing without `moe_router_pre_softmax`.
"""

from __future__ import annotations

from functools import partial

from petatron.models.hf.config_translation import Translation
from petatron.models.hf.decoder_config_json import llama, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.moe_config_json import expert_sizes, experts_in_every_layer, softmax_router
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import EXPERTS, FUSED_EXPERT_MAPPINGS, LLAMA_MAPPINGS, module_mappings
from petatron.models.hf.window_config_json import windows

MIXTRAL_EXPERTS = module_mappings(
    EXPERTS, "model.layers.*.block_sparse_moe.experts.#", {"gate": "w1", "up": "w3", "down": "w2"}
)
_MIXTRAL_MAPPINGS = (
    *LLAMA_MAPPINGS,
    ModuleMapping(("layers.*.mlp.router",), "model.layers.*.block_sparse_moe.gate"),
    *MIXTRAL_EXPERTS,
)


def _mistral(config: Translation, **layer_types: None) -> None:
    llama(config, num_key_value_heads=8, max_position_embeddings=131072)
    no_biases(config)
    windows(config, 4096, **layer_types)
    rope(config)


def _mixtral(config: Translation) -> None:
    config.also(num_local_experts="num_experts")
    llama(config, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    no_biases(config)
    windows(config, None)
    rope(config, rope_theta=1e6)
    mixtral_experts(config)


def mixtral_experts(config: Translation) -> None:
    """Translates experts in every layer whose weights are normalized over the chosen ones."""
    expert_sizes(config)
    softmax_router(config)
    config.only(router_jitter_noise=0.0)  # it would add jitter to the experts' input, not only to the router's
    experts_in_every_layer(config)


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    models="Mistral",
    what_differs="a sliding window in every layer",
    mappings=LLAMA_MAPPINGS,
    translate=_mistral,
)
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    models="Mixtral",
    what_differs="experts in every layer, weights normalized over the chosen ones",
    mappings=_MIXTRAL_MAPPINGS,
    in_memory_mappings=FUSED_EXPERT_MAPPINGS,
    translate=_mixtral,
)
MINISTRAL = Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    models="Ministral",
    what_differs="a window in some layers",
    mappings=LLAMA_MAPPINGS,
    translate=partial(_mistral, layer_types=None),
)
