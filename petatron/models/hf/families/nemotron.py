"""Nemotron (3 and 4, Minitron): LayerNorm with weights as offsets from one, squared ReLU without gates, half of each head rotated."""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS

NEMOTRON = like_llama(
    name="nemotron",
    architecture="NemotronForCausalLM",
    models="Nemotron-3 (2023), Nemotron-4, Minitron",
    what_differs="LayerNorm as offset from one, squared ReLU, half of each head rotated",
    mappings=tuple(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules != ("layers.*.mlp.gate",)),
    keys={**LLAMA_KEYS, "norm_epsilon": "norm_eps"},
    defaults={
        **{key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"},
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "initializer_range": 0.0134,
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 0.5,
    },
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name != "rotary_percent"},
        "normalization": "LayerNorm",
        "apply_layernorm_1p": True,
    },
    activations={"relu2": "squared_relu", "relu": "relu", "gelu": "gelu", "silu": "silu"},
)
