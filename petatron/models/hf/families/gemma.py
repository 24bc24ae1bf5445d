"""Gemma: norms as offsets from one, scaled embeddings, tanh GELU gates.

Gemma 2 adds a norm after each branch, caps of attention scores and logits, windows in every second layer, and scores scaled by a number
of its own; Gemma 3 drops the caps for a qk-norm, and has windows in five of six layers, with a rope of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.required_settings import required
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS
from petatron.models.model_spec import ModelSpec

GEMMA = like_llama(
    name="gemma",
    architecture="GemmaForCausalLM",
    models="Gemma (1)",
    what_differs="norms that multiply by one plus their weight, embeddings times the square root of the width, tanh GELU gates",
    defaults={
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    fixed={
        **LLAMA_FIXED,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    },
    single_values={"attention_bias": False, "use_bidirectional_attention": None},
    # Older files of this family, and of no other, say "gelu" and mean its approximation by tanh, as transformers reads them.
    activations={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh", "silu": "swiglu", "relu": "reglu"},
)

# The name that is the MLP's norm in a Llama is that of attention's output here.
_POST_NORM_MAPPINGS = (
    *(mapping for mapping in LLAMA_MAPPINGS if mapping.logical_modules != ("layers.*.mlp_norm",)),
    ModuleMapping(("layers.*.attention_post_norm",), "model.layers.*.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp_norm",), "model.layers.*.pre_feedforward_layernorm"),
    ModuleMapping(("layers.*.mlp_post_norm",), "model.layers.*.post_feedforward_layernorm"),
)


def _read_query_scale(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    scalar = hf_config["query_pre_attn_scalar"]
    if scalar <= 0:
        return {}, [Problem("query_pre_attn_scalar", str(scalar), "is not positive", "Correct config.json.")]
    return {"softmax_scale": scalar**-0.5}, []


def _write_query_scale(spec: ModelSpec) -> dict[str, Any]:
    """Writes a whole number where it is one but for rounding: transformers takes no other."""
    scalar = required("softmax_scale", spec.config.softmax_scale) ** -2
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}


GEMMA2 = like_llama(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    what_differs="norms before and after branches, soft caps of scores and logits, windows in every second layer",
    mappings=_POST_NORM_MAPPINGS,
    keys={
        **LLAMA_KEYS,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    activation_key="hidden_activation",
    defaults={
        **{key: value for key, value in GEMMA.defaults.items() if key != "hidden_act"},
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={**GEMMA.fixed, "norm_placement": "both"},
    single_values=GEMMA.single_values,
    activations={**GEMMA.activations, "gelu": "geglu"},
    heads_divide_width=True,
    full_attention_every=2,
    read_more=_read_query_scale,
    write_more=_write_query_scale,
    more_settings=("softmax_scale",),
    required=("softmax_scale",),
)
GEMMA3 = like_llama(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 (text)",
    what_differs="qk-norm, windows in five of six layers, with a rope of their own",
    mappings=_POST_NORM_MAPPINGS,
    keys={name: key for name, key in GEMMA2.keys.items() if name != "attn_logit_softcapping"},
    activation_key="hidden_activation",
    defaults={
        **GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "use_bidirectional_attention": False,
    },
    fixed={**GEMMA2.fixed, "qk_layernorm": True},
    # transformers caps no scores here, whatever the key says.
    single_values={"attention_bias": False, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
    activations=GEMMA2.activations,
    heads_divide_width=True,
    rope_by_layer_type=True,
    full_attention_every=6,
    read_more=_read_query_scale,
    write_more=_write_query_scale,
    more_settings=("softmax_scale",),
    required=("softmax_scale",),
)
