"""Bloom and MPT: decoders whose positions are ALiBi's biases of scores.

Bloom normalises embeddings, has biases everywhere, and the queries, keys and values of a head side by side. MPT has no biases, not even
on its LayerNorms, and may clip queries, keys and values; its settings of attention are a table of their own. transformers has no other MLP
width than 4 x hidden size, and MPT's `alibi_bias_max`, `logit_scale` and `qk_ln` do nothing there, so other values are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, ModuleMapping, unsupported_setting
from petatron.models.model_spec import ModelSpec

_QKV = ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v")
_BLOOM_LAYER, _MPT_LAYER = "transformer.h.*", "transformer.blocks.*"
_FIXED: Mapping[str, Any] = {
    "position_embedding_type": "alibi",
    "normalization": "LayerNorm",
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
    "scale_embeddings": False,
}
_MPT_ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "attn_pdrop": 0.0,
    "clip_qkv": None,
    "softmax_scale": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}
_MPT_SINGLE = ("attn_type", "prefix_lm", "qk_ln", "alibi", "alibi_bias_max")


def _wide_mlp(spec: ModelSpec, family: Family) -> list[Problem]:
    model = spec.config
    if model.ffn_hidden_size == 4 * model.hidden_size:
        return []
    return [unsupported_setting("ffn_hidden_size", model.ffn_hidden_size, family, "only 4 x hidden size")]


def _unsupported_bloom(spec: ModelSpec) -> list[Problem]:
    return _wide_mlp(spec, BLOOM)


def _read_bloom(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Sums over slices of the weights, in transformers, leave biases out."""
    if not hf_config.get("slow_but_exact") or hf_config.get("pretraining_tp") in (None, 1):
        return {}, []
    rule = "leaves out biases in transformers, with pretraining_tp above 1"
    return {}, [Problem("slow_but_exact", "True", rule, "Use false, as published models do.")]


BLOOM = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    models="BLOOM",
    what_differs="ALiBi, a norm of embeddings, biases everywhere",
    prefix="transformer.",
    mappings=(
        ModuleMapping(("embedding",), "transformer.word_embeddings"),
        ModuleMapping(("embedding_norm",), "transformer.word_embeddings_layernorm"),
        ModuleMapping(("layers.*.attention_norm",), f"{_BLOOM_LAYER}.input_layernorm"),
        ModuleMapping(_QKV, f"{_BLOOM_LAYER}.self_attention.query_key_value", fused_by_head=True),
        ModuleMapping(("layers.*.attention.out",), f"{_BLOOM_LAYER}.self_attention.dense"),
        ModuleMapping(("layers.*.mlp_norm",), f"{_BLOOM_LAYER}.post_attention_layernorm"),
        ModuleMapping(("layers.*.mlp.up",), f"{_BLOOM_LAYER}.mlp.dense_h_to_4h"),
        ModuleMapping(("layers.*.mlp.down",), f"{_BLOOM_LAYER}.mlp.dense_4h_to_h"),
        ModuleMapping(("norm",), "transformer.ln_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    keys={
        "num_layers": "n_layer",
        "hidden_size": "hidden_size",
        "num_attention_heads": "n_head",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "seq_length",
        "norm_epsilon": "layer_norm_epsilon",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    },
    aliases={"hidden_size": "n_embed", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    has_rope=False,
    activation_key="",
    activations={},
    defaults={
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
    },
    fixed={**_FIXED, "add_bias_linear": True, "activation": "gelu_tanh", "embed_layernorm": True},
    single_values={"apply_residual_connection_post_layernorm": False},
    read_more=_read_bloom,
    heads_divide_width=True,
    unsupported=_unsupported_bloom,
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _read_mpt(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    given = hf_config["attn_config"]
    if not (given is None or isinstance(given, Mapping)):
        return {}, [Problem("attn_config", f"{given!r:.40}", "is not a table of settings", OWN_FOLDER_FIX)]
    attention = {**_MPT_ATTENTION, **(given or {})}
    problems = [
        Problem(
            f"attn_config.{key}",
            f"{attention[key]!r:.40}",
            f"is not {_MPT_ATTENTION[key]!r}, the only value the decoder can express",
            "Use another model; the decoder has no such part.",
        )
        for key in _MPT_SINGLE
        if attention[key] != _MPT_ATTENTION[key]
    ]
    problems += [
        Problem(f"attn_config.{key}", f"{attention[key]!r:.40}", "is not a positive number", OWN_FOLDER_FIX)
        for key in ("clip_qkv", "softmax_scale", "attn_pdrop")
        if attention[key] and not _is_number(attention[key])
    ]
    if problems:
        return {}, problems
    dropout = float(attention["attn_pdrop"] or 0.0)
    scores = {key: None if attention[key] is None else float(attention[key]) for key in ("clip_qkv", "softmax_scale")}
    return {
        **scores,
        "clip_qkv": scores["clip_qkv"] or None,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
    }, []


def _write_mpt(spec: ModelSpec) -> Mapping[str, Any]:
    model = spec.config
    attention = {**_MPT_ATTENTION, "clip_qkv": model.clip_qkv, "softmax_scale": model.softmax_scale}
    # The dropout is a whole number to transformers, which takes no other.
    return {"attn_config": {**attention, "attn_pdrop": 0}, "expansion_ratio": 4}


def _unsupported_mpt(spec: ModelSpec) -> list[Problem]:
    return _wide_mlp(spec, MPT)


MPT = Family(
    name="mpt",
    architecture="MptForCausalLM",
    models="MPT",
    what_differs="ALiBi, no biases at all, queries, keys and values clipped in some",
    prefix="transformer.",
    mappings=(
        ModuleMapping(("embedding",), "transformer.wte"),
        ModuleMapping(("layers.*.attention_norm",), f"{_MPT_LAYER}.norm_1"),
        ModuleMapping(_QKV, f"{_MPT_LAYER}.attn.Wqkv"),
        ModuleMapping(("layers.*.attention.out",), f"{_MPT_LAYER}.attn.out_proj"),
        ModuleMapping(("layers.*.mlp_norm",), f"{_MPT_LAYER}.norm_2"),
        ModuleMapping(("layers.*.mlp.up",), f"{_MPT_LAYER}.ffn.up_proj"),
        ModuleMapping(("layers.*.mlp.down",), f"{_MPT_LAYER}.ffn.down_proj"),
        ModuleMapping(("norm",), "transformer.norm_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    keys={
        "num_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_seq_len",
        "norm_epsilon": "layer_norm_epsilon",
        "init_method_std": "initializer_range",
    },
    has_rope=False,
    activation_key="",
    activations={},
    defaults={
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attn_config": None,
        "expansion_ratio": 4,
        "logit_scale": None,
        "no_bias": True,
    },
    fixed={**_FIXED, "add_bias_linear": False, "add_qkv_bias": False, "norm_bias": False, "activation": "gelu"},
    aliases={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    single_values={"expansion_ratio": 4, "logit_scale": None, "no_bias": True},
    heads_divide_width=True,
    read_more=_read_mpt,
    write_more=_write_mpt,
    more_settings=("clip_qkv", "softmax_scale"),
    unsupported=_unsupported_mpt,
)
