"""StarCoder2: LayerNorm and biases everywhere as in GPT-2, rotary positions, kv heads and windows as in Mistral, a plain MLP."""

from __future__ import annotations

from petatron.models.hf.families.gpt2 import GPT2
from petatron.models.hf.families.llama import like_llama
from petatron.models.hf.family import ModuleMapping
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_FIXED, LLAMA_KEYS, LLAMA_MAPPINGS

STARCODER2 = like_llama(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    what_differs="LayerNorm, biases, a plain MLP",
    mappings=(
        *(mapping for mapping in LLAMA_MAPPINGS if ".mlp." not in mapping.hf_module),
        ModuleMapping(("layers.*.mlp.up",), "model.layers.*.mlp.c_fc"),
        ModuleMapping(("layers.*.mlp.down",), "model.layers.*.mlp.c_proj"),
    ),
    keys={
        **{name: key for name, key in LLAMA_KEYS.items() if name != "kv_channels"},
        "norm_epsilon": "norm_epsilon",
        "add_bias_linear": "use_bias",
        "hidden_dropout": "residual_dropout",
    },
    defaults={
        **{key: value for key, value in LLAMA_DEFAULTS.items() if key not in ("rms_norm_eps", "head_dim")},
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": None,
        "use_bias": True,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    fixed={
        **{name: value for name, value in LLAMA_FIXED.items() if name != "hidden_dropout"},
        "normalization": "LayerNorm",
        "add_qkv_bias": False,
    },
    activations={"gelu_pytorch_tanh": "gelu_tanh", **{k: v for k, v in GPT2.activations.items() if v != "gelu_tanh"}},
)
