"""Draws the config.json of small encoder-decoders, with the settings in which published models differ."""

from __future__ import annotations

from tests.hf.random_configs.draw import Config, Draw

ENCODER_DECODER_FAMILIES = ("t5", "mt5")


def random_encoder_decoder_config(family: str, number: int) -> Config:
    draw = Draw(f"{family} {number}")
    config: Config = {
        "model_type": family,
        "vocab_size": draw.one_of(53, 61, 64, 97),
        "d_model": draw.one_of(12, 24, 32),
        "d_kv": draw.one_of(4, 7, 8, 16),
        "d_ff": draw.one_of(24, 37, 64),
        "num_layers": draw.one_of(1, 2, 3),
        "num_heads": draw.one_of(1, 2, 3, 4),
        "decoder_start_token_id": 0,
    }
    draw.options(
        config,
        num_decoder_layers=(1, 2, 4, None),
        relative_attention_num_buckets=(4, 6, 10, 32),
        relative_attention_max_distance=(17, 20, 128),
        feed_forward_proj=("relu", "gated-gelu", "gated-silu", "gelu", "silu", "gated-relu"),
        layer_norm_epsilon=(1e-6, 1e-3),
        dropout_rate=(0.0, 0.2),
        initializer_factor=(0.05, 0.2),
        tie_word_embeddings=(True, False),
        use_cache=(True, False),
        pad_token_id=(0,),
        eos_token_id=(1,),
        torch_dtype=("float32", "bfloat16"),
        n_positions=(512,),
    )
    return config
