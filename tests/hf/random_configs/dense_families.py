"""Draws the config.json of small models of families without experts, with the settings in which published models differ."""

from __future__ import annotations

from collections.abc import Callable

from tests.hf.random_configs.draw import (
    FULL,
    NO_IDS,
    Config,
    Draw,
    biases,
    rope,
    rope_by_kinds,
    sizes,
    unset_sizes,
    windows,
)

_GATES = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def _gpt2(draw: Draw) -> Config:
    heads = draw.one_of(1, 2, 3, 4)
    config = {
        "vocab_size": draw.one_of(53, 64),
        "n_embd": heads * draw.one_of(5, 8),
        "n_head": heads,
        "n_layer": 2,
        **NO_IDS,
    }
    draw.options(config, n_inner=(None, 37), n_positions=(64,), tie_word_embeddings=(True, False), n_ctx=(64,))
    draw.options(
        config, activation_function=("gelu_new", "gelu", "relu", "quick_gelu", "silu"), layer_norm_epsilon=(1e-3,)
    )
    return config


def _llama(draw: Draw) -> Config:
    config = rope(draw, sizes(draw))
    biases(draw, config)
    unset_sizes(draw, config)
    draw.options(config, hidden_act=_GATES, pretraining_tp=(1, 2))
    return config


def _mistral(draw: Draw) -> Config:
    """With kinds of layers it is a Ministral."""
    config = rope(draw, sizes(draw, any_width=True))
    windows(draw, config)
    return config


def _smollm3(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False))
    biases(draw, config)
    draw.options(
        config,
        no_rope_layer_interval=(1, 2),
        no_rope_layers=([draw.one_of(0, 1) for _ in range(config["num_hidden_layers"])],),
    )
    if draw.chance(0.5):
        config |= {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": draw.kinds(config, FULL, "sliding_attention"),
        }
    return config


def _qwen2(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False))
    windows(draw, config, kinds=False)
    draw.options(config, use_sliding_window=(True, False), max_window_layers=(0, 1, 28), hidden_act=_GATES)
    return config


def _qwen3(draw: Draw) -> Config:
    return _qwen2(draw) | {"head_dim": draw.one_of(8, 10, 16)}


def _gemma(draw: Draw) -> Config:
    config = rope(draw, sizes(draw))
    draw.options(config, hidden_act=("gelu", "gelu_pytorch_tanh", "silu"), use_bidirectional_attention=(None, False))
    return config


def _gemma2(draw: Draw) -> Config:
    config = rope(draw, sizes(draw))
    windows(draw, config)
    draw.options(
        config,
        query_pre_attn_scalar=(1, 7, 12),
        attn_logit_softcapping=(None, 3.0),
        final_logit_softcapping=(None, 4.0),
    )
    draw.options(config, hidden_activation=("gelu", "gelu_pytorch_tanh", "silu"))
    return config


def _gemma3(draw: Draw) -> Config:
    config = rope_by_kinds(draw, sizes(draw), "rope_local_base_freq")
    windows(draw, config)
    draw.options(config, query_pre_attn_scalar=(7, 12), sliding_window_pattern=(2, 3), final_logit_softcapping=(4.0,))
    return config


def olmo2(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False))
    unset_sizes(draw, config)
    return config


def _olmo3(draw: Draw) -> Config:
    config = rope_by_kinds(draw, sizes(draw, head_dim=False))
    windows(draw, config)
    return config


def granite(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False))
    biases(draw, config)
    draw.options(config, embedding_multiplier=(0.3, 2), residual_multiplier=(0.6,), attention_multiplier=(0.3, 1))
    draw.options(config, logits_scaling=(0.7, 2))
    return config


def _phi3(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False), "default", "longrope", part=1.0)
    windows(draw, config, kinds=False)
    return config | {"original_max_position_embeddings": draw.one_of(48, 64)}


def _glm(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, any_width=True) | {"head_dim": draw.one_of(8, 16)}, part=0.5)
    draw.options(config, attention_bias=(True, False))
    return config


def _starcoder2(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False, epsilon="norm_epsilon"))
    windows(draw, config, kinds=False)
    draw.options(config, use_bias=(True, False), hidden_act=("gelu_pytorch_tanh", "gelu", "relu"))
    return config


def _nemotron(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, epsilon="norm_eps") | {"head_dim": draw.one_of(8, 16)}, part=0.5)
    biases(draw, config)
    draw.options(config, hidden_act=("relu2", "gelu"))
    return config


def _gpt_neox(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False, epsilon="layer_norm_eps"), part=0.25)
    own = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    config = {own.get(key, key): value for key, value in config.items() if key != "num_key_value_heads"}
    draw.options(config, use_parallel_residual=(True, False), hidden_act=("gelu", "gelu_new", "relu"))
    return config


def _bloom(draw: Draw) -> Config:
    heads = draw.one_of(1, 3, 4, 6)
    config = {
        "vocab_size": 53,
        draw.one_of("hidden_size", "n_embed"): heads * 6,
        draw.one_of("n_layer", "num_hidden_layers"): 2,
    }
    config |= {draw.one_of("n_head", "num_attention_heads"): heads, **NO_IDS}
    draw.options(config, layer_norm_epsilon=(1e-3,), tie_word_embeddings=(True, False), seq_length=(64,))
    return config


def _mpt(draw: Draw) -> Config:
    heads = draw.one_of(1, 3, 4, 6)
    config = {"vocab_size": 53, "d_model": heads * 6, "n_heads": heads, "n_layers": 2, "max_seq_len": 64, **NO_IDS}
    attention: Config = {}
    draw.options(attention, clip_qkv=(None, 0.8), softmax_scale=(None, 0.5), alibi=(True,))
    draw.options(config, attn_config=(attention,), layer_norm_epsilon=(1e-3,), tie_word_embeddings=(True, False))
    return config


DENSE: dict[str, Callable[[Draw], Config]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo2": olmo2,
    "olmo3": _olmo3,
    "granite": granite,
    "phi3": _phi3,
    "glm": _glm,
    "glm4": _glm,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "mpt": _mpt,
}
