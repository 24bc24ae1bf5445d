"""config.json both ways, in the spellings of old and new transformers, and what cannot be expressed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import ConfigError
from petatron.config import load_config, preset_names
from petatron.config.schema import ModelConfig
from petatron.models.hf import family_for, family_of, from_hf_config, to_hf_config
from tests.hf.ours import run_config
from tests.hf.zoo import BUILDERS, truth

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}


@pytest.mark.parametrize("name", BUILDERS)
def test_there_and_back(name: str, tmp_path: Path):
    model = run_config(truth(name).config, tmp_path).model
    again = from_hf_config(to_hf_config(model))
    for field, value in again.items():
        assert value == (pytest.approx(getattr(model, field)) if isinstance(value, float) else getattr(model, field))


def test_llama2_as_published():
    """The keys of a Llama 2 file, before head_dim, biases and rope_parameters were written."""
    values = from_hf_config({**LLAMA, "rope_scaling": None, "rms_norm_eps": 1e-5, "pretraining_tp": 1})
    assert values["num_query_groups"] == 4 and not values["group_query_attention"] and values["kv_channels"] == 16
    assert values["untie_embeddings_and_output_weights"] and values["rotary_base"] == 10000.0
    assert values["position_embedding_type"] == "rope" and not values["add_bias_linear"]
    assert values["max_position_embeddings"] == 2048 and values["hidden_dropout"] == 0.0


def test_llama31_as_published():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    values = from_hf_config({**LLAMA, "rope_scaling": scaling, "rope_theta": 500000.0, "num_key_value_heads": 2})
    assert values["use_rope_scaling"] and values["rope_scaling_factor"] == 8.0 and values["rotary_base"] == 500000.0
    assert values["original_max_position_embeddings"] == 8192 and values["num_query_groups"] == 2


def test_legacy_yarn_takes_its_factor_and_context_from_the_lengths():
    config = {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 131072, "num_key_value_heads": 2}
    values = from_hf_config({**config, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768}})
    assert values["position_embedding_type"] == "yarn" and values["rope_scaling_factor"] == 4.0
    assert (values["yarn_mscale"], values["yarn_mscale_all_dim"]) == (1.0, 0.0)
    values = from_hf_config({**config, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.5}})
    assert values["original_max_position_embeddings"] == 131072 and values["yarn_mscale"] == 1.0, (
        "one mscale counts not"
    )


def test_mistral_without_a_word_slides_and_with_null_does_not():
    assert from_hf_config({**LLAMA, "model_type": "mistral", "num_key_value_heads": 2})["window_size"] == 4096
    assert from_hf_config({**LLAMA, "model_type": "mistral", "sliding_window": None})["window_size"] is None


def test_qwen_ignores_a_window_that_is_turned_off():
    assert from_hf_config({**LLAMA, "model_type": "qwen2", "sliding_window": 8})["window_size"] is None


def test_gpt2_as_published():
    values = from_hf_config({**GPT2, "n_ctx": 1024, "task_specific_params": {}, "architectures": ["GPT2LMHeadModel"]})
    assert values["ffn_hidden_size"] == 256 and values["activation"] == "gelu_tanh"
    assert not values["untie_embeddings_and_output_weights"] and values["hidden_dropout"] == 0.1


UNREADABLE = {
    "family": ({"model_type": "mixtral"}, r'model_type "mixtral" is not a family'),
    "no family": ({}, "model_type is missing"),
    "missing key": (
        {"model_type": "llama", "hidden_size": 64},
        "num_hidden_layers is missing, and a llama config.json",
    ),
    "no number": ({**LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers '2' is not a positive whole number"),
    "heads": ({**LLAMA, "num_attention_heads": 5}, "num_attention_heads 5 does not divide the width 64"),
    "activation": ({**LLAMA, "hidden_act": "mish"}, 'hidden_act "mish" is not an activation'),
    "attention bias": ({**LLAMA, "attention_bias": True}, "attention_bias True and mlp_bias False differ"),
    "qwen3 bias": ({**LLAMA, "model_type": "qwen3", "attention_bias": True}, "attention_bias True is not False"),
    "linear rope": ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, 'rope_scaling.rope_type "linear"'),
    "rope per layer": ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
    "partial rope": ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 rotates a part"),
    "llama3 lacks": ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks one of factor, low_freq"),
    "yarn bounds": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "rope_scaling.truncate false",
    ),
    "yarn temperature": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}},
        "rope_scaling.attention_factor 1.2 changes attention",
    ),
    "mixed layers": (
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "layer_types full_attention and sliding_attention",
    ),
    "quantized": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config says that the weights are"),
    "dropouts": ({**GPT2, "embd_pdrop": 0.2}, "embd_pdrop 0.2 is not resid_pdrop 0.1"),
    "unscaled": ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights False is not True"),
    "layer scale": ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "cross attention": ({**GPT2, "add_cross_attention": True}, "add_cross_attention True is not False"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_the_decoder_cannot_express_is_refused(case: str):
    config, message = UNREADABLE[case]
    with pytest.raises(ConfigError) as caught:
        from_hf_config(config)
    assert message in str(caught.value)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**LLAMA, "hidden_act": "mish", "attention_bias": True, "rope_scaling": {"type": "dynamic"}})
    assert len(caught.value.problems) == 3


def derived(flags: str) -> ModelConfig:
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    return load_config((base + flags).split(), require_training=False).config.model


_ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
UNWRITABLE = {
    "norm": (
        _ROPE + "--normalization LayerNorm",
        "--normalization LayerNorm cannot be written as a Hugging Face llama",
    ),
    "plain MLP": (_ROPE + "--activation gelu", "--activation gelu"),
    "partial rope": (_ROPE + "--rotary-percent 0.5", "--rotary-percent 0.5"),
    "no positions": (_ROPE + "--position-embedding-type none", "--position-embedding-type none"),
    "window with biases": (_ROPE + "--add-bias-linear --window-size 4", "--add-bias-linear True"),
    "gpt2 groups": ("--num-query-groups 2", "--num-query-groups 2 cannot be written as a Hugging Face gpt2"),
    "gpt2 head width": ("--kv-channels 8", "--kv-channels 8"),
    "gpt2 without biases": ("--disable-bias-linear", "--add-bias-linear False"),
    "gpt2 gated": ("--swiglu", "--activation swiglu"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_the_family_cannot_express_is_refused(case: str):
    flags, message = UNWRITABLE[case]
    with pytest.raises(ConfigError) as caught:
        to_hf_config(derived(flags))
    assert message in str(caught.value)


FAMILY = {
    "": "gpt2",
    _ROPE: "llama",
    _ROPE + "--add-bias-linear": "llama",
    _ROPE + "--window-size 4": "mistral",
    _ROPE + "--add-qkv-bias": "qwen2",
    _ROPE + "--qk-layernorm": "qwen3",
    _ROPE + "--hidden-size 60 --num-attention-heads 8 --kv-channels 16": "mistral",
}


@pytest.mark.parametrize("flags", FAMILY)
def test_family_is_told_by_the_model(flags: str):
    model = derived(flags)
    assert family_for(model) == family_of(to_hf_config(model)) == FAMILY[flags]


def test_dropout_of_training_does_not_stop_an_export():
    assert "hidden_dropout" not in to_hf_config(derived(_ROPE + "--hidden-dropout 0.1"))


def test_presets_name_the_family_they_are_called_by():
    for preset in preset_names():
        expected = {"qwen2.5-7b": "qwen2", "qwen3-4b": "qwen3", "qwen3-8b": "qwen3", "tiny-gpt": "gpt2"}.get(preset)
        expected = expected or ("llama" if preset.startswith(("llama", "tiny-llama")) else None)
        if expected is not None:
            model = load_config(preset=preset, require_training=False).config.model
            content = to_hf_config(replace(model, vocab_size=model.vocab_size or 1000))
            assert content["model_type"] == expected, preset
