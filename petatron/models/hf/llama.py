"""Llama and the families that differ from it in a detail: Mistral (window), Qwen2 (biases on q, k, v), Qwen3 (qk-norm),
Gemma (norms as offsets from one, scaled embeddings).

All five use the same names, so there is one table of mappings. Rope settings have a file of their own, `rope_config_json.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petatron.config.schema.model import ActivationName
from petatron.models.hf.family import Family, ModuleMapping

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

LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA_FIXED: Mapping[str, Any] = {
    "apply_layernorm_1p": False,
    "scale_embeddings": False,
    "normalization": "RMSNorm",
    "rotary_percent": 1.0,
    "qk_layernorm": False,
    "hidden_dropout": 0.0,
}
_ACTIVATIONS: Mapping[str, ActivationName] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}
SLIDING_WINDOW_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    mappings=LLAMA_MAPPINGS,
    ignored_tensors=("*rotary_emb.inv_freq",),
    keys=LLAMA_KEYS,
    activation_key="hidden_act",
    defaults={**LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    fixed=LLAMA_FIXED,
    single_values={},
    activations=_ACTIVATIONS,
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    defaults={**LLAMA_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    fixed={**LLAMA_FIXED, "add_bias_linear": False},
)
QWEN2 = replace(
    LLAMA,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**LLAMA_DEFAULTS, **SLIDING_WINDOW_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": True},
)
QWEN3 = replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={
        **QWEN2.defaults,
        "head_dim": 128,
        "attention_bias": False,
    },
    fixed={**LLAMA_FIXED, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True},
    single_values={"attention_bias": False},  # it would be a bias on the output projection too, but not on the MLP
)
GEMMA = replace(
    LLAMA,
    name="gemma",
    architecture="GemmaForCausalLM",
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
        "window_size": None,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    },
    single_values={"attention_bias": False, "use_bidirectional_attention": None},
    # Older files say "gelu" and mean its approximation by tanh, as transformers reads them.
    activations={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh", "silu": "swiglu", "relu": "reglu"},
)
