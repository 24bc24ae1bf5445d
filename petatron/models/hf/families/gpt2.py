"""GPT-2: learned positions, LayerNorm, biases everywhere. Its matrices are stored transposed, and q, k and v as one."""

from __future__ import annotations

from petatron.models.hf.family import Family, ModuleMapping

_GPT2_MAPPINGS = (
    ModuleMapping(("embedding",), "transformer.wte"),
    ModuleMapping(("position",), "transformer.wpe"),
    ModuleMapping(("layers.*.attention_norm",), "transformer.h.*.ln_1"),
    ModuleMapping(
        ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v"),
        "transformer.h.*.attn.c_attn",
        transposed=True,
    ),
    ModuleMapping(("layers.*.attention.out",), "transformer.h.*.attn.c_proj", transposed=True),
    ModuleMapping(("layers.*.mlp_norm",), "transformer.h.*.ln_2"),
    ModuleMapping(("layers.*.mlp.up",), "transformer.h.*.mlp.c_fc", transposed=True),
    ModuleMapping(("layers.*.mlp.down",), "transformer.h.*.mlp.c_proj", transposed=True),
    ModuleMapping(("norm",), "transformer.ln_f"),
    ModuleMapping(("head",), "lm_head"),
)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2",
    what_differs="learned positions, LayerNorm, biases everywhere",
    prefix="transformer.",
    mappings=_GPT2_MAPPINGS,
    ignored_tensors=("*.attn.bias", "*.attn.masked_bias"),  # the causal mask, as buffers
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "ffn_hidden_size": "n_inner",
        "num_attention_heads": "n_head",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "init_method_std": "initializer_range",
    },
    has_rope=False,
    activation_key="activation_function",
    defaults={
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "qk_layernorm": False,
        "apply_layernorm_1p": False,
        "scale_embeddings": False,
    },
    aliases={
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    single_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    activations={
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu": "gelu",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "squared_relu",
        "silu": "silu",
        "swish": "silu",
    },
)
