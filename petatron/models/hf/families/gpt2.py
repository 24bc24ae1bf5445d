"""GPT-2: learned positions, LayerNorm, biases everywhere. Its matrices are stored transposed, and q, k and v as one."""

from __future__ import annotations

from petatron.models.hf.decoder_config_json import PLAIN, activation, dropouts, heads, tied_embeddings
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.hf.translation import Translation

_GPT2_MAPPINGS = (
    ModuleMapping(("embedding",), "transformer.wte"),
    ModuleMapping(("position",), "transformer.wpe"),
    ModuleMapping(("layers.*.attention_norm",), "transformer.h.*.ln_1"),
    ModuleMapping(
        ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v"),
        "transformer.h.*.attn.c_attn",
        transposed=True,
    ),
    ModuleMapping(("layers.*.attention.out",), "transformer.h.*.attn.c_proj", transposed=True),
    ModuleMapping(("layers.*.mlp_norm",), "transformer.h.*.ln_2"),
    ModuleMapping(("layers.*.mlp.up",), "transformer.h.*.mlp.c_fc", transposed=True),
    ModuleMapping(("layers.*.mlp.down",), "transformer.h.*.mlp.c_proj", transposed=True),
    ModuleMapping(("norm",), "transformer.ln_f"),
    ModuleMapping(("head",), "lm_head"),
)


def layer_norms(config: Translation) -> None:
    """Says what layers with LayerNorms are in families before Llama."""
    config.always(normalization="LayerNorm", qk_layernorm=False, apply_layernorm_1p=False, scale_embeddings=False)


def _translate(config: Translation) -> None:
    config.also(n_embd="hidden_size", n_positions="max_position_embeddings")
    config.also(n_head="num_attention_heads", n_layer="num_hidden_layers")
    config.copy("num_layers", "n_layer")
    config.copy("hidden_size", "n_embd")
    config.copy("ffn_hidden_size", "n_inner", None)
    config.copy("num_attention_heads", "n_head")
    config.copy("vocab_size", "vocab_size")
    config.copy("max_position_embeddings", "n_positions", 1024)
    config.copy("norm_epsilon", "layer_norm_epsilon", 1e-5)
    config.copy("attention_dropout", "attn_pdrop", 0.1)
    config.copy("init_method_std", "initializer_range", 0.02)
    dropouts(config, "resid_pdrop", "embd_pdrop", 0.1)
    heads(config)
    activation(config, "activation_function", "gelu_new", PLAIN)
    tied_embeddings(config, True)
    layer_norms(config)
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
