"""Draws the config.json of small encoders, with the settings in which published models differ."""

from __future__ import annotations

from collections.abc import Callable

from tests.hf.random_configs.draw import FULL, SLIDING, Config, Draw

_ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh")


def _sizes(draw: Draw) -> Config:
    heads = draw.one_of(1, 2, 3, 4)
    config: Config = {
        "vocab_size": draw.one_of(53, 61, 64, 97),
        "hidden_size": heads * draw.one_of(6, 8, 16),
        "intermediate_size": draw.one_of(24, 37, 64),
        "num_hidden_layers": draw.one_of(1, 2, 3, 4),
        "num_attention_heads": heads,
        "max_position_embeddings": draw.one_of(48, 64),
    }
    draw.options(config, torch_dtype=("float32", "bfloat16"), use_cache=(True, False), initializer_range=(0.02, 0.3))
    return config


def _bert(draw: Draw) -> Config:
    config = _sizes(draw)
    draw.options(
        config,
        hidden_act=_ACTIVATIONS,
        type_vocab_size=(1, 2, 3),
        layer_norm_eps=(1e-12, 1e-3),
        hidden_dropout_prob=(0.0, 0.2),
        attention_probs_dropout_prob=(0.0, 0.2),
        position_embedding_type=("absolute",),
        pad_token_id=(0,),
        gradient_checkpointing=(False,),
    )
    return config


def _roberta(draw: Draw) -> Config:
    config = _bert(draw) | {"pad_token_id": draw.one_of(0, 1, 3)}
    draw.options(config, bos_token_id=(0,), eos_token_id=(2,), classifier_dropout=(None, 0.1))
    return config


def _modernbert(draw: Draw) -> Config:
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    config = _sizes(draw) | dict.fromkeys(ids, 3)
    bias = draw.chance(0.4)
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), bias)
    draw.options(
        config,
        hidden_activation=("gelu", "silu", "gelu_pytorch_tanh", "relu"),
        classifier_activation=_ACTIVATIONS,
        local_attention=(2, 8, 14, 128),
        norm_eps=(1e-5, 1e-3),
        norm_bias=(True, False),
        decoder_bias=(True, False),
        tie_word_embeddings=(True, False),
        attention_dropout=(0.0, 0.1),
    )
    spelling = draw.one_of("none", "kinds", "every")
    if spelling == "kinds":
        config["layer_types"] = draw.kinds(config, FULL, SLIDING)
    if spelling == "every":
        config["global_attn_every_n_layers"] = draw.one_of(1, 2, 3)
    if draw.chance(0.5):
        config |= {"global_rope_theta": draw.one_of(1000.0, 160000.0), "local_rope_theta": draw.one_of(100.0, 10000.0)}
    return config


ENCODER_FAMILIES: dict[str, Callable[[Draw], Config]] = {
    "bert": _bert,
    "megatron-bert": _bert,
    "roberta": _roberta,
    "modernbert": _modernbert,
}


def random_encoder_config(family: str, number: int) -> Config:
    return {"model_type": family, **ENCODER_FAMILIES[family](Draw(f"{family} {number}"))}
