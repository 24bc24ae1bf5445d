"""Llama 1 to 3: rotary positions, RMSNorm, a gated MLP. Most families differ from it in a detail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from petatron.models.hf.family import Family
from petatron.models.hf.shared_tables import (
    GATED_ACTIVATION_NAMES,
    LLAMA_DEFAULTS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_MAPPINGS,
)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    models="Llama 1 to 3",
    what_differs="rotary positions, RMSNorm, a gated MLP; linear, Llama 3 and YaRN scaling",
    prefix="model.",
    mappings=LLAMA_MAPPINGS,
    ignored_tensors=("*rotary_emb.inv_freq",),
    keys=LLAMA_KEYS,
    activation_key="hidden_act",
    defaults={**LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    fixed=LLAMA_FIXED,
    single_values={},
    heads_divide_width=True,
    activations=GATED_ACTIVATION_NAMES,
)


def like_llama(**changes: Any) -> Family:
    """Returns the tables of a family that differs from Llama in some of them."""
    return replace(LLAMA, **{"heads_divide_width": False, **changes})
