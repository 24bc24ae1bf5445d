"""Gemma: norms as offsets from one, scaled embeddings, tanh GELU gates."""

from __future__ import annotations

from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED

GEMMA = like_llama(
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
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    },
    single_values={"attention_bias": False, "use_bidirectional_attention": None},
    # Older files say "gelu" and mean its approximation by tanh, as transformers reads them.
    activations={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh", "silu": "swiglu", "relu": "reglu"},
)
