"""Finds the Hugging Face family of a model, from its config.json or from its `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.models.hf.family import Family
from petatron.models.hf.gpt2 import GPT2
from petatron.models.hf.llama import GEMMA, LLAMA, MISTRAL, QWEN2, QWEN3
from petatron.models.hf.moe_families import MIXTRAL, QWEN2_MOE, QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
}


def get_family(name: str) -> Family:
    """Returns the tables of a family."""
    if name not in FAMILIES:
        raise ConfigError([_unknown_family(name)])
    return FAMILIES[name]


def family_name_of_config(config: Mapping[str, Any]) -> str:
    """Returns the family that the content of a config.json names.

    >>> family_name_of_config({"model_type": "qwen3"})
    'qwen3'
    """
    return get_family(str(config.get("model_type", ""))).name


def family_name_for_model(model: ModelConfig, moe: MoEConfig | None = None) -> str:
    """Returns the family a model is written as: the first one whose details it has. Whether all of it fits is checked later.

    `moe` is given if some layers are MoE layers.

    >>> family_name_for_model(ModelConfig(position_embedding_type="rope", num_attention_heads=4, hidden_size=64, window_size=8))
    'mistral'
    """
    if moe is not None:
        if model.qk_layernorm:
            return QWEN3_MOE.name
        return MIXTRAL.name if moe.moe_shared_expert_intermediate_size is None else QWEN2_MOE.name
    if model.position_embedding_type == "learned_absolute":
        return GPT2.name
    if model.apply_layernorm_1p and model.scale_embeddings:
        return GEMMA.name
    if model.qk_layernorm:
        return QWEN3.name
    if model.add_qkv_bias and not model.add_bias_linear:
        return QWEN2.name
    # transformers refuses a Llama whose width is no multiple of its heads; a Mistral without window is the same model.
    if model.window_size is not None or model.hidden_size % model.num_attention_heads:
        return MISTRAL.name
    return LLAMA.name


def _unknown_family(name: str) -> Problem:
    known = ", ".join(FAMILIES)
    rule = "is not a family this version can read or write" if name else "is missing"
    return Problem("model_type", f'"{name}"' if name else "", rule, f"Families: {known}.")
