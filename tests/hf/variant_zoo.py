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

_MAMBA_2 = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 6, "chunk_size": 8}
_BAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8}
_FALCON_H1 = {
    **_BAMBA,
    "mamba_d_head": 6,
    "mamba_d_ssm": 48,
    "head_dim": 12,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.7, 0.8, 1.3, 0.6, 1.1],
    "ssm_out_multiplier": 0.5,
    "mlp_multipliers": [0.75, 0.65],
}
_HYBRID = ["linear_attention", "full_attention"]
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
}


def _bloom(**changes: Any) -> Any:
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.BloomForCausalLM(transformers.BloomConfig(**{**base, **changes}))


def _mpt(**changes: Any) -> Any:
    base = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "use_cache": True}
    return transformers.MptForCausalLM(transformers.MptConfig(**{**base, **changes}))


def _mamba2(**changes: Any) -> Any:
    shape = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**shape, **ids, **_MAMBA_2, **changes}))


def _nemotron_h(*kinds: str, **changes: Any) -> Any:
    """Step sizes are bounded below in transformers, for whole sequences only: here by a bound that is never met."""
    base = {key: value for key, value in SHAPE.items() if key != "num_hidden_layers"}
    base |= {"head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2}
    base |= {"chunk_size": 8, "layers_block_type": list(kinds), "time_step_min": 1e-30}
    return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**{**base, **changes}))


def _granite_hybrid(**changes: Any) -> Any:
    base = {"layer_types": _HYBRID, "num_local_experts": 0, "shared_intermediate_size": 28}
    return _build("GraniteMoeHybrid", **{**_BAMBA, **_MULTIPLIERS, **base, **changes})


def _qwen3_next(**changes: Any) -> Any:
    base = {
        "head_dim": 16,
        "layer_types": ["linear_attention", _FULL],
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 28,
    }
    return _build("Qwen3Next", **{**base, **changes})


def _kimi_linear(**changes: Any) -> Any:
    base = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 5,
        "v_head_dim": 7,
        "layer_types": ["linear_attention", _FULL],
        "linear_head_dim": 6,
        "linear_num_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
    }
    return _build("KimiLinear", **{**base, **changes})


def _minimax(**changes: Any) -> Any:
    base = {
        "head_dim": 16,
        "layer_types": ["linear_attention", _FULL],
        "block_size": 5,
        "num_local_experts": 4,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.9,
        "linear_attn_alpha_factor": 1.4,
        "linear_attn_beta_factor": 0.8,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 1.1,
    }
    return _build("MiniMax", **{**base, **changes})


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
    "qwen3-next-moe": _qwen3_next,
    "qwen3-next-moe-dense-layer": lambda: _qwen3_next(
        layer_types=[_FULL, "linear_attention"],
        linear_num_value_heads=6,
        linear_conv_kernel_dim=3,
        mlp_only_layers=[0],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=_PARTIAL_ROPE,
    ),
    "kimi-linear-moe": _kimi_linear,
    "kimi-linear-moe-groups": lambda: _kimi_linear(
        mlp_layer_types=["sparse", "dense"],
        n_group=4,
        topk_group=2,
        q_lora_rank=20,
        linear_conv_kernel_dim=3,
        routed_scaling_factor=1.3,
    ),
    "minimax-moe": _minimax,
    "minimax-moe-attention-first": lambda: _minimax(
        layer_types=[_FULL, "linear_attention"],
        num_attention_heads=2,
        num_experts_per_tok=3,
        block_size=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
    ),
    "mamba2": _mamba2,
    "mamba2-tied-one-group": lambda: _mamba2(n_groups=1, head_dim=16, expand=4, tie_word_embeddings=True),
    "bloom": _bloom,
    "bloom-six-heads-untied": lambda: _bloom(n_head=6, hidden_size=36, tie_word_embeddings=False),
    "mpt": lambda: _mpt(),
    "mpt-clipped": lambda: _mpt(n_heads=6, d_model=36, attn_config={"clip_qkv": 0.8, "softmax_scale": 0.5}),
    "falcon-h1": lambda: _build("FalconH1", **_FALCON_H1),
    "falcon-h1-norm-then-gate": lambda: _build("FalconH1", **_FALCON_H1, mamba_rms_norm=True, tie_word_embeddings=True),
    "falcon-h1-gate-then-norm": lambda: _build(
        "FalconH1", **_FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "bamba": lambda: _build("Bamba", **_BAMBA, attn_layer_indices=[1]),
    "nemotron-h": lambda: _nemotron_h("linear_attention", "mlp", "full_attention", "linear_attention"),
    "nemotron-h-moe": lambda: _nemotron_h(
        "linear_attention", "moe", "full_attention", "mlp", **_NEMOTRON_EXPERTS, moe_latent_size=20
    ),
    "granite-hybrid": _granite_hybrid,
    "granite-hybrid-rope": lambda: _granite_hybrid(position_embedding_type="rope", layer_types=_HYBRID[::-1]),
    "granite-hybrid-moe": lambda: _granite_hybrid(num_local_experts=4, tie_word_embeddings=True),
    "granite-moe": lambda: _build("GraniteMoe", **_MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
}
