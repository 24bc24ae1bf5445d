"""Builders of families with variants of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

VOCABULARY = 61  # odd, so that every tensor-parallel size pads it
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,  # a padding token would have no gradient
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MULTIPLIERS = {
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
}


def _build(family: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    return getattr(transformers, f"{family}ForCausalLM")(config(**{**SHAPE, **changes}))


def _gemma(family: str, **changes: Any) -> Any:
    base = {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 5, "layer_types": [_SLIDING, _FULL]}
    return _build(family, **{**base, **changes})


def _llama4(**changes: Any) -> Any:
    base = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
    }
    base |= {"attention_chunk_size": 5, "no_rope_layers": [1, 0, 1, 1], "floor_scale": 3, "attn_scale": 0.4}
    base |= {"rope_parameters": {**_LLAMA4_ROPE}}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**SHAPE, **base, **changes}))


def _neox(**changes: Any) -> Any:
    base = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**base, "rotary_pct": 0.5, **changes}))


_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GEMMA3_ROPE = {
    _FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
_OLMO3_ROPE = {
    _FULL: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 500.0},
}

_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 0.6}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "truncate": False,
    "rope_theta": 100.0,
    "original_max_position_embeddings": 64,
}

_LLAMA4_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.1, 2.0, 4.0, 16.0],
}
_GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_mtp_layers": 0,
}

VARIANT_BUILDERS: dict[str, Callable[[], Any]] = {
    "ministral-alternating": lambda: _build("Ministral", sliding_window=5, head_dim=8, layer_types=[_SLIDING, _FULL]),
    "smollm3": lambda: _build("SmolLM3", no_rope_layer_interval=2),
    "gemma2": lambda: _gemma("Gemma2", attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    "gemma2-untied": lambda: _gemma("Gemma2", attn_logit_softcapping=None, tie_word_embeddings=False),
    "gemma3": lambda: _gemma("Gemma3", rope_parameters=_GEMMA3_ROPE),
    "olmo2": lambda: _build("Olmo2"),
    "olmo3": lambda: _build("Olmo3", sliding_window=5, layer_types=[_SLIDING, _FULL], rope_parameters=_OLMO3_ROPE),
    "olmoe-moe": lambda: _build("Olmoe", num_experts=4, num_experts_per_tok=2),
    "phi3": lambda: _build("Phi3"),
    "phi3-partial-window": lambda: _build("Phi3", sliding_window=5, rope_parameters=_PARTIAL_ROPE),
    "phi3-longrope": lambda: _build("Phi3", original_max_position_embeddings=32, rope_parameters=dict(_LONGROPE)),
    "phi3-longrope-factor": lambda: _build(
        "Phi3", original_max_position_embeddings=32, rope_parameters={**_LONGROPE, "attention_factor": 1.3}
    ),
    "starcoder2": lambda: _build("Starcoder2", sliding_window=5),
    "starcoder2-no-biases": lambda: _build("Starcoder2", use_bias=False, tie_word_embeddings=False),
    "nemotron": lambda: _build("Nemotron", head_dim=16),
    "gpt-neox": lambda: _neox(),
    "gpt-neox-sequential": lambda: _neox(use_parallel_residual=False, hidden_act="gelu_new"),
    "gpt-oss": lambda: _build(
        "GptOss", **_GPT_OSS, head_dim=16, layer_types=[_SLIDING, _FULL], rope_parameters=dict(_GPT_OSS_YARN)
    ),
    "gpt-oss-default-rope": lambda: _build("GptOss", **_GPT_OSS, head_dim=8, tie_word_embeddings=True),
    "llama4-moe": lambda: _llama4(moe_layers=[1, 3]),
    "llama4-moe-everywhere": lambda: _llama4(
        num_hidden_layers=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_chunk_size=7,
        no_rope_layers=[1, 1],
    ),
    "glm": lambda: _build("Glm", head_dim=16),
    "glm4": lambda: _build("Glm4", head_dim=8, attention_bias=False),
    "glm4-moe": lambda: _build("Glm4Moe", **_GLM_EXPERTS, head_dim=16, use_qk_norm=True, attention_bias=True),
    "glm4-moe-groups": lambda: _build("Glm4Moe", **{**_GLM_EXPERTS, "n_group": 4, "topk_group": 2}),
    "granite": lambda: _build("Granite", **_MULTIPLIERS),
    "granite-biases": lambda: _build("Granite", **_MULTIPLIERS, attention_bias=True, mlp_bias=True),
    "granite-moe": lambda: _build("GraniteMoe", **_MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
}
