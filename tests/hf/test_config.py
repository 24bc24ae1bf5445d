"""config.json both ways, in the spellings of old and new transformers, and what cannot be expressed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.config import preset_names
from petatron.models.hf import (
    build_config_json,
    family_name_of_config,
    from_hf_config,
    matching_family,
    parse_config_json,
    to_hf_config,
)
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec, spec_from_config
from petatron.validate import load_config
from tests.hf.ours import run_config
from tests.hf.zoo import ZOO, truth

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28}
QWEN2_MOE = {**LLAMA, **QWEN, "model_type": "qwen2_moe", "num_key_value_heads": 4}
QWEN3_MOE = {**LLAMA, **QWEN, "model_type": "qwen3_moe", "num_key_value_heads": 4}
SMOLLM3 = {**LLAMA, "model_type": "smollm3"}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}

BLOOM: dict[str, Any] = {"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 100}
MPT: dict[str, Any] = {"model_type": "mpt", "n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize("name", ZOO)
def test_there_and_back(name: str, tmp_path: Path):
    """Read, written and read again is the same, and so is what is written of that."""
    run = run_config(truth(name).config, tmp_path)
    first = parse_config_json(truth(name).config)
    written = build_config_json(model_spec(run), torch.bfloat16)
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    for before, after, section in zip(first, parse_config_json(written), (run.model, run.moe)):
        assert before == {
            key: pytest.approx(value) if isinstance(value, float) else value for key, value in after.items()
        }
        assert all(value == pytest.approx(getattr(section, key)) for key, value in after.items() if value is not None)
    again = run_config(written, tmp_path)
    assert build_config_json(model_spec(again), "bfloat16") == written


def test_llama2_as_published():
    """The keys of a Llama 2 file, before head_dim, biases and rope_parameters were written."""
    values, _ = from_hf_config({**LLAMA, "rope_scaling": None, "rms_norm_eps": 1e-5, "pretraining_tp": 1})
    assert values["num_query_groups"] == 4 and not values["group_query_attention"] and values["kv_channels"] == 16
    assert values["untie_embeddings_and_output_weights"] and values["rotary_base"] == 10000.0
    assert values["position_embedding_type"] == "rope" and not values["add_bias_linear"]
    assert values["max_position_embeddings"] == 2048 and values["hidden_dropout"] == 0.0


def test_llama31_as_published():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    values, _ = from_hf_config({**LLAMA, "rope_scaling": scaling, "rope_theta": 500000.0, "num_key_value_heads": 2})
    assert values["use_rope_scaling"] and values["rope_scaling_factor"] == 8.0 and values["rotary_base"] == 500000.0
    assert values["original_max_position_embeddings"] == 8192 and values["num_query_groups"] == 2


def test_legacy_yarn_takes_its_factor_and_context_from_the_lengths():
    config = {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 131072, "num_key_value_heads": 2}
    values, _ = from_hf_config({**config, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768}})
    assert values["position_embedding_type"] == "yarn" and values["rope_scaling_factor"] == 4.0
    assert (values["yarn_mscale"], values["yarn_mscale_all_dim"]) == (1.0, 0.0)
    values, _ = from_hf_config({**config, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.5}})
    assert values["original_max_position_embeddings"] == 131072 and values["yarn_mscale"] == 1.0, (
        "one mscale counts not"
    )


def test_mistral_without_a_word_slides_and_with_null_does_not():
    assert from_hf_config({**LLAMA, "model_type": "mistral", "num_key_value_heads": 2})[0]["window_size"] == 4096
    assert from_hf_config({**LLAMA, "model_type": "mistral", "sliding_window": None})[0]["window_size"] is None


def test_qwen_ignores_a_window_that_is_turned_off():
    assert from_hf_config({**LLAMA, "model_type": "qwen2", "sliding_window": 8})[0]["window_size"] is None


def test_bloom_and_mpt_as_published():
    """BLOOM's files have older names of keys; MPT's settings of attention are a table."""
    old = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880}
    values, _ = from_hf_config(old)
    sizes = {name: values[name] for name in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")}
    assert sizes == {"hidden_size": 1024, "num_layers": 24, "num_attention_heads": 16, "ffn_hidden_size": 4096}
    assert values["embed_layernorm"] and values["position_embedding_type"] == "alibi"
    assert not values["untie_embeddings_and_output_weights"]
    table = {"clip_qkv": 6, "softmax_scale": None, "alibi": True, "attn_impl": "torch", "attn_pdrop": 0}
    values, _ = from_hf_config({**MPT, "attn_config": table, "max_seq_len": 8192})
    assert values["clip_qkv"] == 6.0 and values["max_position_embeddings"] == 8192 and not values["norm_bias"]


def test_gpt2_as_published():
    values, _ = from_hf_config(
        {**GPT2, "n_ctx": 1024, "task_specific_params": {}, "architectures": ["GPT2LMHeadModel"]}
    )
    assert values["ffn_hidden_size"] == 256 and values["activation"] == "gelu_tanh"
    assert not values["untie_embeddings_and_output_weights"] and values["hidden_dropout"] == 0.1


def test_mixtral_as_published():
    values, experts = from_hf_config({**MIXTRAL, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0})
    assert values["ffn_hidden_size"] == experts["moe_ffn_hidden_size"] == 96 and experts["num_experts"] == 4
    assert experts["moe_layer_freq"] == "1" and not experts["moe_router_pre_softmax"]
    assert from_hf_config(MIXTRAL)[0]["rotary_base"] == 1e6, "this family's own default"


def test_qwen2_moe_as_published():
    """Before layer_types and qkv_bias were written; the weights of the chosen experts are not normalized by default."""
    values, experts = from_hf_config({**QWEN2_MOE, "sliding_window": 32768, "max_window_layers": 21})
    assert values["window_size"] is None and values["add_qkv_bias"] and values["ffn_hidden_size"] == 96
    assert experts["moe_router_pre_softmax"] and experts["moe_router_topk"] == 2
    assert experts["moe_shared_expert_intermediate_size"] == 28 and experts["moe_shared_expert_gate"]


def test_qwen3_moe_in_both_spellings_of_its_experts():
    _, experts = from_hf_config({**QWEN3_MOE, "max_window_layers": 48, "norm_topk_prob": True})
    renamed = {
        key.replace("num_experts", "num_local_experts") if key == "num_experts" else key: value
        for key, value in QWEN3_MOE.items()
    }
    assert from_hf_config({**renamed, "norm_topk_prob": True})[1] == experts
    assert experts["num_experts"] == 4 and not experts["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"decoder_sparse_step": 2}, "[0, 1, 0, 1]"),
        ({"mlp_only_layers": [0, 3]}, "[0, 1, 1, 0]"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "[0, 0, 0, 1]"),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, "1"),
    ],
)
def test_which_layers_have_experts(keys: dict[str, Any], pattern: str):
    assert from_hf_config({**QWEN3_MOE, "num_hidden_layers": 4, **keys})[1]["moe_layer_freq"] == pattern


UNREADABLE = {
    "family": ({"model_type": "opt"}, r'model_type "opt" is not a family'),
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
    "dynamic rope": ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}}, 'rope_scaling.rope_type "dynamic"'),
    "no rope list": (
        {**SMOLLM3, "no_rope_layers": [1]},
        "no_rope_layers [1] is not one 0 or 1 for each of the 2 layers",
    ),
    "rope per layer": ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differs between layers"),
    "partial rope": ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 rotates a part"),
    "llama3 lacks": ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks one of factor, low_freq"),
    "yarn temperature": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}},
        "rope_scaling.attention_factor 1.2 changes attention",
    ),
    "kind of layer": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types chunked_attention is none of the kinds that a qwen2 model has here",
    ),
    "number of kinds": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention"]},
        "layer_types does not name the kind of each of the 2 layers",
    ),
    "window without a width": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types sliding_attention needs a sliding_window, and there is none",
    ),
    "quantized": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config says that the weights are"),
    "dropouts": ({**GPT2, "embd_pdrop": 0.2}, "embd_pdrop 0.2 is not resid_pdrop 0.1"),
    "unscaled": ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights False is not True"),
    "layer scale": ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "no expert count": ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts 0 is not a positive whole number"),
    "expert count missing": (
        {**LLAMA, "model_type": "qwen3_moe"},
        "num_experts is missing, and a qwen3_moe config.json",
    ),
    "more choices than experts": (
        {**MIXTRAL, "num_experts_per_tok": 5},
        "num_experts_per_tok 5 is more than the 4 experts",
    ),
    "jitter": ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not 0.0"),
    "no step": ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step 0 is not a positive whole number"),
    "no expert layer": ({**QWEN3_MOE, "decoder_sparse_step": 3}, "leave no layer of 2 for the experts"),
    "unnamed window": ({**QWEN2_MOE, "use_sliding_window": True}, "layer_types is missing, and a sliding window"),
    "own, empty": ({"model_type": "petatron"}, "model is missing, and a petatron config.json needs it"),
    "own, unknown": (
        {"model_type": "petatron", "model": {"flux": 1}},
        "model.flux 1 is not a setting this version has",
    ),
    "own, a run's": (
        {"model_type": "petatron", "model": {}, "moe": {"moe_grouped_gemm": True}},
        "moe.moe_grouped_gemm True",
    ),
    "bloom residual": ({**BLOOM, "apply_residual_connection_post_layernorm": True}, "layernorm True is not False"),
    "mpt table": ({**MPT, "attn_config": [1]}, "attn_config [1] is not a table of settings"),
    "mpt clip": ({**MPT, "attn_config": {"clip_qkv": "8"}}, "attn_config.clip_qkv '8' is not a positive number"),
    "mpt queries": ({**MPT, "attn_config": {"attn_type": "multiquery_attention"}}, "is not 'multihead_attention'"),
    "mpt no alibi": ({**MPT, "attn_config": {"alibi": False}}, "attn_config.alibi False is not True"),
    "mpt bias": ({**MPT, "no_bias": False}, "no_bias False is not True"),
    "cross attention": ({**GPT2, "add_cross_attention": True}, "add_cross_attention True is not False"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_the_decoder_cannot_express_is_refused(case: str):
    config, message = UNREADABLE[case]
    with pytest.raises(ConfigError) as caught:
        parse_config_json(config)
    assert message in str(caught.value)


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        from_hf_config({**LLAMA, "hidden_act": "mish", "attention_bias": True, "rope_scaling": {"type": "dynamic"}})
    assert len(caught.value.problems) == 3


def derived(flags: str) -> ModelSpec:
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    return model_spec(load_config((base + flags).split(), require_training=False).config)


_ROPE = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
_MOE = _ROPE + "--num-experts 4 "
_SHARED = _MOE + "--moe-shared-expert-intermediate-size 32 "
UNWRITABLE = {
    "norm": (
        _ROPE + "--normalization LayerNorm",
        "--normalization LayerNorm cannot be written as a Hugging Face llama",
    ),
    "plain MLP": (_ROPE + "--activation gelu", "--activation gelu"),
    "partial rope": (_ROPE + "--rotary-percent 0.5 --qk-layernorm", "--rotary-percent 0.5"),
    "no positions": (_ROPE + "--position-embedding-type none", "--position-embedding-type none"),
    "window with biases": (
        _ROPE + "--add-bias-linear --window-size 4 --kv-channels 8",
        "--window-size 4 cannot be written as a Hugging Face llama",
    ),
    "bloom width": (
        "--position-embedding-type alibi --embed-layernorm --activation gelu_tanh --ffn-hidden-size 100",
        "--ffn-hidden-size 100 cannot be written as a Hugging Face bloom model, which has only 4 x hidden size",
    ),
    "mpt width": (
        "--position-embedding-type alibi --no-norm-bias --disable-bias-linear --ffn-hidden-size 100",
        "--ffn-hidden-size 100 cannot be written as a Hugging Face mpt model, which has only 4 x hidden size",
    ),
    "gpt2 groups": ("--num-query-groups 2", "--num-query-groups 2 cannot be written as a Hugging Face gpt2"),
    "gpt2 head width": ("--kv-channels 8", "--kv-channels 8"),
    "gpt2 without biases": ("--disable-bias-linear", "--add-bias-linear False"),
    "gpt2 gated": ("--swiglu", "--activation swiglu"),
    "mixtral biases": (
        _MOE + "--add-bias-linear",
        "--add-bias-linear True cannot be written as a Hugging Face mixtral",
    ),
    "mixtral qkv biases": (_MOE + "--add-qkv-bias", "--add-qkv-bias True"),
    "mixtral plain experts": (_MOE + "--activation squared_relu", "--activation squared_relu"),
    "mixtral dense layer": (_MOE + "--moe-layer-freq 2", "--moe-layer-freq 2"),
    "mixtral scores": (_MOE + "--moe-router-pre-softmax", "--moe-router-pre-softmax True"),
    "sigmoid": (_MOE + "--moe-router-score-function sigmoid", "--moe-router-score-function sigmoid"),
    "sinkhorn": (_MOE + "--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
    "expert bias": (
        _MOE + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias True",
    ),
    "groups": (_MOE + "--moe-router-num-groups 2 --moe-router-group-topk 1", "--moe-router-group-topk 1"),
    "scaled": (_MOE + "--moe-router-topk-scaling-factor 2.5", "--moe-router-topk-scaling-factor 2.5"),
    "latent": (_MOE + "--moe-latent-size 16", "--moe-latent-size 16"),
    "latent attention": (
        _ROPE + "--multi-latent-attention",
        "--multi-latent-attention True cannot be written as a Hugging Face llama model, which has no such part",
    ),
    "ungated shared expert": (
        _SHARED,
        "--moe-shared-expert-intermediate-size 32 cannot be written as a Hugging Face mixtral",
    ),
    "shared with head norms": (_SHARED + "--qk-layernorm", "--moe-shared-expert-intermediate-size 32"),
    "experts without rotation": (_MOE + "--position-embedding-type none", "--position-embedding-type none"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_the_family_cannot_express_is_refused(case: str):
    flags, message = UNWRITABLE[case]
    with pytest.raises(ConfigError) as caught:
        to_hf_config(derived(flags))
    assert message in str(caught.value)
    assert matching_family(derived(flags)) is None


FAMILY = {
    "": "gpt2",
    _ROPE: "llama",
    _ROPE + "--add-bias-linear": "llama",
    _ROPE + "--window-size 4": "mistral",
    _ROPE + "--add-qkv-bias": "qwen2",
    _ROPE + "--qk-layernorm": "qwen3",
    _ROPE + "--hidden-size 60 --num-attention-heads 8 --kv-channels 16": "mistral",
    _MOE: "mixtral",
    _MOE + "--window-size 4 --moe-expert-capacity-factor 1.5 --moe-aux-loss-coeff 0.01": "mixtral",
    _SHARED + "--moe-shared-expert-gate": "qwen2_moe",
    _SHARED + "--moe-shared-expert-gate --add-qkv-bias --moe-layer-freq ([0]+[1])": "qwen2_moe",
    _MOE + "--qk-layernorm --moe-router-pre-softmax --window-size 4": "qwen3_moe",
}


@pytest.mark.parametrize("flags", FAMILY)
def test_family_is_told_by_the_model(flags: str):
    spec = derived(flags)
    assert family_name_of_config(to_hf_config(spec)) == FAMILY[flags]
    family = matching_family(spec)
    assert family is not None and family.name == FAMILY[flags]


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_no_family_expresses_is_written_as_our_own_and_read_back(case: str):
    spec = derived(UNWRITABLE[case][0])
    model, moe = spec.config, spec.moe
    content = json.loads(json.dumps(build_config_json(spec, torch.float32)))
    assert content["model_type"] == "petatron" and content["dtype"] == "float32"
    values, experts = parse_config_json(content)
    assert replace(model, **values) == model and values["hidden_size"] == 64 and "seq_length" not in values
    assert bool(experts) == (moe is not None)
    if moe is not None:
        again = replace(moe, **experts)
        assert spec_from_config(model, again).moe_layers == spec.moe_layers
        assert replace(again, moe_layer_freq=moe.moe_layer_freq) == moe


def test_dropout_of_training_does_not_stop_an_export():
    assert "hidden_dropout" not in to_hf_config(derived(_ROPE + "--hidden-dropout 0.1"))


def test_presets_name_the_family_they_are_called_by():
    for preset in preset_names():
        expected = {"qwen2.5-7b": "qwen2", "qwen3-4b": "qwen3", "qwen3-8b": "qwen3", "tiny-gpt": "gpt2"}.get(preset)
        expected = expected or ("llama" if preset.startswith(("llama", "tiny-llama")) else None)
        if expected is not None:
            model = load_config(preset=preset, require_training=False).config.model
            content = to_hf_config(spec_from_config(replace(model, vocab_size=model.vocab_size or 1000)))
            assert content["model_type"] == expected, preset
