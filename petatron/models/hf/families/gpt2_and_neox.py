"""GPT-2: learned positions, LayerNorm, biases everywhere. Its matrices are stored transposed, and q, k and v as one.

GPT-NeoX and Pythia: parallel branches with a norm each, LayerNorm, a part of each head rotated, q, k and v of a head side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

from petatron.base.errors import Problem
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import PLAIN, activation, dropouts, heads, tied_embeddings
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.rope_config_json import rope
from petatron.models.hf.shared_tensor_names import QKV
from petatron.models.model_spec import ModelSpec

_SIZES = {"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head", "vocab_size": "vocab_size"}
_GPT2_MAPPINGS = (
    ModuleMapping(("embedding",), "transformer.wte"),
    ModuleMapping(("position",), "transformer.wpe"),
    ModuleMapping(("layers.*.attention_norm",), "transformer.h.*.ln_1"),
    ModuleMapping(QKV, "transformer.h.*.attn.c_attn", transposed=True),
    ModuleMapping(("layers.*.attention.out",), "transformer.h.*.attn.c_proj", transposed=True),
    ModuleMapping(("layers.*.mlp_norm",), "transformer.h.*.ln_2"),
    ModuleMapping(("layers.*.mlp.up",), "transformer.h.*.mlp.c_fc", transposed=True),
    ModuleMapping(("layers.*.mlp.down",), "transformer.h.*.mlp.c_proj", transposed=True),
    ModuleMapping(("norm",), "transformer.ln_f"),
    ModuleMapping(("head",), "lm_head"),
)


def gpt(config: Translation, sizes: Mapping[str, str], *, tied: bool, divide_width: bool = False) -> None:
    """Translates what families before Llama have in common: `sizes` by the keys of these, an untied or tied head, LayerNorms."""
    for setting, key in sizes.items():
        config.copy(setting, key)
    config.copy("init_method_std", "initializer_range", 0.02)
    heads(config, divide_width=divide_width)
    tied_embeddings(config, tied)
    config.always(normalization="LayerNorm", qk_layernorm=False, apply_layernorm_1p=False, scale_embeddings=False)


def _gpt2(config: Translation) -> None:
    config.also(n_embd="hidden_size", n_positions="max_position_embeddings")
    config.also(n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.copy("ffn_hidden_size", "n_inner", None)
    config.copy("max_position_embeddings", "n_positions", 1024)
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    config.copy("attention_dropout", "attn_pdrop", 0.1)
    dropouts(config, "resid_pdrop", "embd_pdrop", 0.1)
    gpt(config, _SIZES, tied=True)
    activation(config, "activation_function", "gelu_new", PLAIN)
    config.always(position_embedding_type="learned_absolute", add_bias_linear=True)
    config.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2",
    what_differs="learned positions, LayerNorm, biases everywhere",
    prefix="transformer.",
    mappings=_GPT2_MAPPINGS,
    ignored_tensors=("*.attn.bias", "*.attn.masked_bias"),  # the causal mask, as buffers
    translate=_gpt2,
)


_LAYER = "gpt_neox.layers.*"
_NEOX_MAPPINGS = (
    ModuleMapping(("embedding",), "gpt_neox.embed_in"),
    ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
    ModuleMapping(QKV, f"{_LAYER}.attention.query_key_value", fused_by_head=True),
    ModuleMapping(("layers.*.attention.out",), f"{_LAYER}.attention.dense"),
    ModuleMapping(("layers.*.mlp_norm",), f"{_LAYER}.post_attention_layernorm"),
    ModuleMapping(("layers.*.mlp.up",), f"{_LAYER}.mlp.dense_h_to_4h"),
    ModuleMapping(("layers.*.mlp.down",), f"{_LAYER}.mlp.dense_4h_to_h"),
    ModuleMapping(("norm",), "gpt_neox.final_layer_norm"),
)


_ROPE_KEYS = {"rope_theta": ("rotary_emb_base", 10000.0), "partial_rotary_factor": ("rotary_pct", 0.25)}
"""The keys of other families, with those of this one and transformers' defaults."""


def _read_residuals(keys: Keys) -> tuple[Settings, list[Problem]]:
    table = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    problems = [
        Problem(
            key, str(keys[key]), f"is not read by transformers, which has {spelling} here", f"Write {spelling} too."
        )
        for key, (spelling, default) in _ROPE_KEYS.items()
        if key not in table and keys.get(key, default) != keys.get(spelling, default)
    ]
    return {"residual_branches": "parallel" if keys["use_parallel_residual"] else "sequential"}, problems


def _write_residuals(spec: ModelSpec) -> Keys:
    model = spec.config
    rope = {"rotary_emb_base": model.rotary_base, "rotary_pct": model.rotary_percent}
    return {"use_parallel_residual": model.residual_branches == "parallel", **rope}


def _gpt_neox(config: Translation) -> None:
    config.also(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    config.copy("ffn_hidden_size", "intermediate_size", 24576)
    config.copy("norm_epsilon", "layer_norm_eps", 1e-5)
    config.copy_same(max_position_embeddings=2048, hidden_dropout=0.0, attention_dropout=0.0)
    same = {name: name for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    gpt(config, {"num_layers": "num_hidden_layers", **same}, tied=False, divide_width=True)
    activation(config, "hidden_act", "gelu", PLAIN)
    config.always(add_bias_linear=True)
    config.only(attention_bias=True)
    rope(config, partial_rotary_factor=0.25)
    config.convert(("residual_branches",), _read_residuals, _write_residuals, use_parallel_residual=True)
    config.expect(
        "residual_branches", "other ways", lambda spec: spec.config.residual_branches != "parallel_shared_norm"
    )


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    models="GPT-NeoX, Pythia",
    what_differs="attention and MLP in parallel, part of each head rotated",
    prefix="gpt_neox.",
    mappings=(*_NEOX_MAPPINGS, ModuleMapping(("head",), "embed_out")),
    in_memory_mappings=(*_NEOX_MAPPINGS, ModuleMapping(("head",), "lm_head")),
    ignored_tensors=("*.attention.bias", "*.attention.masked_bias", "*rotary_emb.inv_freq"),
    translate=_gpt_neox,
)
