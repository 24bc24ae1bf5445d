"""GPT-2: learned positions, LayerNorm, biases everywhere. Its matrices are stored transposed, and q, k and v as one."""

from __future__ import annotations

from collections.abc import Mapping

from petatron.models.hf.decoder_config_json import PLAIN, activation, dropouts, heads, tied_embeddings
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.shared_tables import QKV
from petatron.models.hf.translation import Translation

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


def _translate(config: Translation) -> None:
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
    translate=_translate,
)
