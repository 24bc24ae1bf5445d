"""Phi-3 and Phi-4: a Llama with q, k and v in one matrix, gate and up in another, and part of each head rotated in some.

Their long contexts ("longrope") have two lists of factors. transformers chooses by the length of each input; here a run has one, by its
`--seq-length`, and generates up to the original context with the short ones. Files before that name say "su" or "yarn", and it is their
only kind of scaling in transformers.
"""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS

_FUSED = (
    "layers.*.attention.q",
    "layers.*.attention.k",
    "layers.*.attention.v",
    "layers.*.mlp.gate",
    "layers.*.mlp.up",
)

PHI3 = like_llama(
    name="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-4, Phi-4-mini",
    what_differs="q, k and v in one matrix, gate and up in another, part of each head rotated",
    mappings=(
        *(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules[0] not in _FUSED),
        ModuleMapping(_FUSED[:3], "model.layers.*.self_attn.qkv_proj"),
        ModuleMapping(_FUSED[3:], "model.layers.*.mlp.gate_up_proj"),
    ),
    keys={
        **{name: key for name, key in LLAMA_KEYS.items() if name != "kv_channels"},
        "hidden_dropout": "resid_pdrop",
    },
    defaults={
        **LLAMA_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    rope_types={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")},
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name not in ("hidden_dropout", "rotary_percent")},
        "add_bias_linear": False,
    },
)
