"""Bloom and MPT: decoders whose positions are ALiBi's biases of scores.

Bloom normalizes embeddings, has biases everywhere, and the queries, keys and values of a head side by side. MPT has no biases, not even
on its LayerNorms, and may clip queries, keys and values; its settings of attention are a table of their own. transformers has no other MLP
width than 4 x hidden size, and MPT's `alibi_bias_max`, `logit_scale` and `qk_ln` do nothing there, so other values are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.sections.rope import is_factor
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, Keys, Settings, Translation
from petatron.models.hf.families.gpt2_and_neox import gpt
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.shared_tensor_names import QKV
from petatron.models.model_spec import ModelSpec

_BLOOM_LAYER, _MPT_LAYER = "transformer.h.*", "transformer.blocks.*"
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


def _alibi_decoder(config: Translation, **sizes: str) -> None:
    """Translates what Bloom and MPT have in common; `sizes` are their keys."""
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    gpt(config, {**sizes, "vocab_size": "vocab_size"}, tied=True, divide_width=True)
    config.always(position_embedding_type="alibi")
    config.expect(
        "ffn_hidden_size",
        "only 4 x hidden size",
        lambda spec: spec.config.ffn_hidden_size == 4 * spec.config.hidden_size,
    )


def _bloom(config: Translation) -> None:
    config.also(hidden_size="n_embed", n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.copy("max_position_embeddings", "seq_length", 2048)
    config.copy_same(hidden_dropout=0.0, attention_dropout=0.0)
    _alibi_decoder(config, num_layers="n_layer", hidden_size="hidden_size", num_attention_heads="n_head")
    config.always(add_bias_linear=True, activation="gelu_tanh", embed_layernorm=True)
    config.only(apply_residual_connection_post_layernorm=False)
    config.convert((), _read_bloom)


def _read_bloom(keys: Keys) -> tuple[Settings, list[Problem]]:
    """Sums over slices of the weights, in transformers, leave biases out."""
    if not keys.get("slow_but_exact") or keys.get("pretraining_tp") in (None, 1):
        return {}, []
    rule = "leaves out biases in transformers, with pretraining_tp above 1"
    return {}, [Problem("slow_but_exact", "True", rule, "Use false, as published models do.")]


def _mpt(config: Translation) -> None:
    config.also(d_model="hidden_size", n_heads="num_attention_heads", n_layers="num_hidden_layers")
    config.copy("max_position_embeddings", "max_seq_len", 2048)
    _alibi_decoder(config, num_layers="n_layers", hidden_size="d_model", num_attention_heads="n_heads")
    config.always(add_bias_linear=False, add_qkv_bias=False, norm_bias=False, activation="gelu")
    config.only(expansion_ratio=4, logit_scale=None, no_bias=True)
    config.convert(("clip_qkv", "softmax_scale"), _read_mpt, _write_mpt, attn_config=None)


def _read_mpt(keys: Keys) -> tuple[Settings, list[Problem]]:
    given = keys["attn_config"]
    if not (given is None or isinstance(given, Mapping)):
        return {}, [Problem("attn_config", f"{given!r:.40}", "is not a table of settings", OWN_FOLDER_FIX)]
    attention = {**_MPT_ATTENTION, **(given or {})}
    problems = [
        Problem(
            f"attn_config.{key}",
            f"{attention[key]!r:.40}",
            f"is not {_MPT_ATTENTION[key]!r}, the only value the decoder can express",
            OTHER_MODEL_FIX,
        )
        for key in _MPT_SINGLE
        if attention[key] != _MPT_ATTENTION[key]
    ]
    problems += [
        Problem(f"attn_config.{key}", f"{attention[key]!r:.40}", "is not a positive number", OWN_FOLDER_FIX)
        for key in ("clip_qkv", "softmax_scale", "attn_pdrop")
        if attention[key] and not is_factor(attention[key])
    ]
    if problems:
        return {}, problems
    dropout = float(attention["attn_pdrop"] or 0.0)
    scores = {key: None if attention[key] is None else float(attention[key]) for key in ("clip_qkv", "softmax_scale")}
    dropouts = {"attention_dropout": dropout, "hidden_dropout": dropout}
    return {**scores, "clip_qkv": scores["clip_qkv"] or None, **dropouts}, []


def _write_mpt(spec: ModelSpec) -> Keys:
    model = spec.config
    attention = {**_MPT_ATTENTION, "clip_qkv": model.clip_qkv, "softmax_scale": model.softmax_scale}
    # The dropout is a whole number to transformers, which takes no other.
    return {"attn_config": {**attention, "attn_pdrop": 0}}


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
        ModuleMapping(QKV, f"{_BLOOM_LAYER}.self_attention.query_key_value", fused_by_head=True),
        ModuleMapping(("layers.*.attention.out",), f"{_BLOOM_LAYER}.self_attention.dense"),
        ModuleMapping(("layers.*.mlp_norm",), f"{_BLOOM_LAYER}.post_attention_layernorm"),
        ModuleMapping(("layers.*.mlp.up",), f"{_BLOOM_LAYER}.mlp.dense_h_to_4h"),
        ModuleMapping(("layers.*.mlp.down",), f"{_BLOOM_LAYER}.mlp.dense_4h_to_h"),
        ModuleMapping(("norm",), "transformer.ln_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    translate=_bloom,
)
MPT = Family(
    name="mpt",
    architecture="MptForCausalLM",
    models="MPT",
    what_differs="ALiBi, no biases at all, queries, keys and values clipped in some",
    prefix="transformer.",
    mappings=(
        ModuleMapping(("embedding",), "transformer.wte"),
        ModuleMapping(("layers.*.attention_norm",), f"{_MPT_LAYER}.norm_1"),
        ModuleMapping(QKV, f"{_MPT_LAYER}.attn.Wqkv"),
        ModuleMapping(("layers.*.attention.out",), f"{_MPT_LAYER}.attn.out_proj"),
        ModuleMapping(("layers.*.mlp_norm",), f"{_MPT_LAYER}.norm_2"),
        ModuleMapping(("layers.*.mlp.up",), f"{_MPT_LAYER}.ffn.up_proj"),
        ModuleMapping(("layers.*.mlp.down",), f"{_MPT_LAYER}.ffn.down_proj"),
        ModuleMapping(("norm",), "transformer.norm_f"),
        ModuleMapping(("head",), "lm_head"),
    ),
    ignored_tensors=(),
    translate=_mpt,
)
