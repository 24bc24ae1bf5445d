"""Draws the config.json of a small model of each family; here are those with experts, with Mamba-2 and with delta nets."""

from __future__ import annotations

from collections.abc import Callable

from tests.hf.random_configs.dense_families import DENSE, granite, olmo2
from tests.hf.random_configs.draw import (
    CHUNKED,
    FULL,
    LINEAR,
    NO_IDS,
    Config,
    Draw,
    experts,
    grouped_experts,
    latent_attention,
    mamba,
    rope,
    sizes,
    windows,
)

BAMBA_NAMES = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "expand": "mamba_expand",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "chunk": "mamba_chunk_size",
}
MAMBA2_NAMES = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "expand": "expand",
    "state": "state_size",
    "groups": "n_groups",
    "chunk": "chunk_size",
}


def _mixtral(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, any_width=True))
    windows(draw, config, kinds=False)
    experts(draw, config, "num_local_experts")
    return config


def _qwen_experts(draw: Draw, config: Config) -> None:
    experts(draw, config)
    config["moe_intermediate_size"] = draw.one_of(12, 37)
    draw.options(config, norm_topk_prob=(True, False), decoder_sparse_step=(1, 2), mlp_only_layers=([], [0]))


def _qwen2_moe(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, head_dim=False)) | {"shared_expert_intermediate_size": 28}
    _qwen_experts(draw, config)
    draw.options(config, qkv_bias=(True, False))
    return config


def _qwen3_moe(draw: Draw) -> Config:
    config = rope(draw, sizes(draw))
    _qwen_experts(draw, config)
    if draw.chance(0.3):
        config["num_local_experts"] = config.pop("num_experts")
    return config


def _qwen3_next(draw: Draw) -> Config:
    keys = draw.one_of(1, 2)
    config = rope(draw, sizes(draw) | {"head_dim": draw.one_of(8, 16)}, part=0.25) | {
        "shared_expert_intermediate_size": 28
    }
    config |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_num_key_heads": keys}
    config |= {"linear_num_value_heads": keys * draw.one_of(1, 2)}
    _qwen_experts(draw, config)
    draw.options(
        config,
        linear_conv_kernel_dim=(3, 4),
        full_attention_interval=(1, 2),
        layer_types=(draw.kinds(config, FULL, LINEAR),),
    )
    return config


def _kimi_linear(draw: Draw) -> Config:
    config = sizes(draw, head_dim=False) | {
        "linear_head_dim": 6,
        "linear_num_heads": draw.one_of(1, 4),
        "tie_word_embeddings": False,
    }
    latent_attention(draw, config)
    names = {"n_routed_experts": "num_experts", "n_group": "num_expert_group", "n_shared_experts": "num_shared_experts"}
    grouped_experts(draw, config, names if draw.chance(0.5) else {"n_routed_experts": "num_local_experts"})
    draw.options(config, layer_types=(draw.kinds(config, FULL, LINEAR),), linear_conv_kernel_dim=(3,))
    return config


def _minimax(draw: Draw) -> Config:
    config = rope(draw, sizes(draw))
    experts(draw, config, "num_local_experts")
    factors = [
        f"{branch}_{part}_factor" for branch in ("full_attn", "linear_attn", "mlp") for part in ("alpha", "beta")
    ]
    config |= {name: draw.one_of(0.7, 1.5, 2) for name in factors if draw.chance(0.4)}
    draw.options(config, layer_types=(draw.kinds(config, FULL, LINEAR),), block_size=(4, 64))
    return config


def _olmoe(draw: Draw) -> Config:
    config = olmo2(draw)
    experts(draw, config)
    draw.options(config, norm_topk_prob=(True, False))
    return config


def _granite_moe(draw: Draw) -> Config:
    config = {key: value for key, value in granite(draw).items() if key not in ("attention_bias", "mlp_bias")}
    experts(draw, config, "num_local_experts")
    return config


def _gpt_oss(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, any_width=True))
    windows(draw, config)
    experts(draw, config, "num_local_experts")
    draw.options(config, swiglu_limit=(0.6,), rope_scaling=(config.get("rope_scaling"),))
    return config


def _llama4(draw: Draw) -> Config:
    config = rope(draw, sizes(draw)) | {"intermediate_size_mlp": 40, "num_local_experts": draw.one_of(2, 4)}
    config |= {"attention_chunk_size": draw.one_of(5, 64), "floor_scale": draw.one_of(3, 8192)}
    rotary = [draw.one_of(0, 1) for _ in range(config["num_hidden_layers"])]
    draw.options(
        config, no_rope_layers=(rotary, []), no_rope_layer_interval=(1, 2), use_qk_norm=(True, False), moe_layers=([0],)
    )
    draw.options(config, attn_temperature_tuning=(True, False), attn_scale=(0.4,))
    if draw.chance(0.2):
        config["layer_types"] = [CHUNKED if rotates else FULL for rotates in rotary]
        config["no_rope_layers"] = rotary
    return config


def _deepseek_v2(draw: Draw) -> Config:
    config: Config = {**sizes(draw, head_dim=False), "rms_norm_eps": 1e-6}
    latent_attention(draw, config)
    grouped_experts(draw, config)
    config["topk_method"] = draw.one_of("greedy", "group_limited_greedy")
    return rope(draw, config, width=config["qk_rope_head_dim"])


def _deepseek_v3(draw: Draw) -> Config:
    config = {key: value for key, value in _deepseek_v2(draw).items() if key != "topk_method"}
    return config | {draw.one_of("num_nextn_predict_layers", "num_mtp_layers"): draw.one_of(0, 1)}


def _indexer(draw: Draw, config: Config) -> Config:
    """Of several heads: where all score nothing, scores are equal, and transformers' `topk` takes any."""
    config |= {"index_n_heads": draw.one_of(8, 12), "index_head_dim": draw.one_of(8, 16, 24)}
    draw.options(config, index_topk=(3, 6, 64))
    return config | {"index_head_dim": max(config["index_head_dim"], config["qk_rope_head_dim"])}


def _deepseek_v32(draw: Draw) -> Config:
    drawn = _deepseek_v2(draw)
    config = {key: value for key, value in drawn.items() if key not in ("topk_method", "topk_group", "n_group")}
    config |= {"n_group": 2, "topk_group": draw.one_of(1, 2), "q_lora_rank": draw.one_of(8, 12)}
    return _indexer(draw, config)


def _glm_moe_dsa(draw: Draw) -> Config:
    config = _deepseek_v32(draw) | {"rms_norm_eps": draw.one_of(1e-5, 1e-6)}
    draw.options(config, index_topk_freq=(1, 2), index_topk_pattern=("F" * config["num_hidden_layers"],))
    return config


def _glm4_moe(draw: Draw) -> Config:
    config = rope(draw, sizes(draw) | {"head_dim": draw.one_of(8, 16)}, part=0.5)
    grouped_experts(draw, config)
    draw.options(config, attention_bias=(True, False), use_qk_norm=(True, False))
    return config | {
        "first_k_dense_replace": draw.random.randrange(config["num_hidden_layers"]),
        "num_nextn_predict_layers": 0,
    }


def _mamba2(draw: Draw) -> Config:
    width = draw.one_of(16, 24)
    config = {
        "vocab_size": 53,
        "hidden_size": width,
        "num_hidden_layers": 2,
        **NO_IDS,
        **mamba(draw, width, MAMBA2_NAMES),
    }
    draw.options(config, tie_word_embeddings=(True, False), layer_norm_epsilon=(1e-3,), residual_in_fp32=(True, False))
    return config


def _bamba(draw: Draw) -> Config:
    config = sizes(draw, head_dim=False)
    config |= mamba(draw, config["hidden_size"], BAMBA_NAMES)
    return rope(draw, config, "default", "linear") | {"attn_layer_indices": draw.one_of(None, [0])}


def _nemotron_h(draw: Draw) -> Config:
    """Step sizes are bounded below in transformers, for whole sequences only: here by a bound that is never met."""
    config = {
        key: value for key, value in sizes(draw, epsilon="layer_norm_epsilon").items() if key != "num_hidden_layers"
    }
    config |= {
        "tie_word_embeddings": False,
        "mamba_num_heads": draw.one_of(2, 4),
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
    }
    config |= {draw.one_of("n_groups", "mamba_n_groups"): draw.one_of(1, 2), "chunk_size": 8, "time_step_min": 1e-30}
    grouped_experts(draw, config)
    pattern = "*" + "".join(draw.one_of("M", "*", "-", "E") for _ in range(3))
    names = {"M": draw.one_of("mamba", LINEAR), "*": draw.one_of("attention", FULL), "-": "mlp", "E": "moe"}
    spelled = (
        {"hybrid_override_pattern": pattern}
        if draw.chance(0.5)
        else {"layers_block_type": [names[kind] for kind in pattern]}
    )
    return config | spelled | {"moe_shared_expert_intermediate_size": 20, "moe_latent_size": draw.one_of(None, 10)}


def _falcon_h1(draw: Draw) -> Config:
    config = rope(draw, sizes(draw, any_width=True))
    config |= mamba(draw, config["hidden_size"], BAMBA_NAMES) | {"mamba_d_ssm": None}
    draw.options(config, mamba_rms_norm=(True, False), mamba_norm_before_gate=(True, False), lm_head_multiplier=(0.3,))
    draw.options(
        config, key_multiplier=(0.7,), ssm_multipliers=([0.3, 1.0, 1.5, 0.7, 1.2],), mlp_multipliers=([0.7, 1.4],)
    )
    draw.options(config, attention_in_multiplier=(0.6,), attention_out_multiplier=(1.3,), ssm_out_multiplier=(0.4,))
    return config


def _granite_hybrid(draw: Draw) -> Config:
    config = rope(draw, {key: value for key, value in granite(draw).items() if "rope" not in key and "bias" not in key})
    config |= mamba(draw, config["hidden_size"], BAMBA_NAMES) | {"shared_intermediate_size": 28, "num_local_experts": 0}
    draw.options(
        config, layer_types=(draw.kinds(config, "mamba", "attention"),), position_embedding_type=(None, "rope", "nope")
    )
    if draw.chance(0.5):
        experts(draw, config, "num_local_experts")
    return config


_OTHERS: dict[str, Callable[[Draw], Config]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "kimi_linear": _kimi_linear,
    "minimax": _minimax,
    "olmoe": _olmoe,
    "granitemoe": _granite_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _glm_moe_dsa,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
}
FAMILIES = DENSE | _OTHERS


def random_config(family: str, number: int) -> Config:
    """The content of a config.json; the same for the same number."""
    return {"model_type": family, **FAMILIES[family](Draw(f"{family} {number}"))}
