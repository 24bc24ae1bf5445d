"""T5 and its relatives: encoder-decoders with relative positions, in which scores are not scaled.

T5 has an MLP without a gate and an output head that is the embedding over the root of the width. T5 1.1, which Flan-T5 and UL2 are too, has
gated MLPs and an output head of its own; so has mT5. transformers ties heads where a folder has none, whatever config.json says, so whether
there is one is asked of the folder's tensors (`tie_missing_head`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import isclose, sqrt
from typing import Any, Literal

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.encoder_decoder import ENCODER_DECODER_MODEL, RELATIVE_POSITIONS
from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS, ActivationName
from petatron.models.hf.check_claimed_counts import MAX_LAYERS
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.decoder_config_json import PLAIN, heads, no_biases
from petatron.models.hf.family import Family, ModuleMapping
from petatron.models.model_spec import ModelSpec

_UNTIED = "untie_embeddings_and_output_weights"
_GATED: Mapping[str, ActivationName] = {
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu": "geglu",
    "silu": "swiglu",
    "swish": "swiglu",
    "relu": "reglu",
}


def _layers(stack: Literal["encoder", "decoder"], num_branches: int) -> tuple[ModuleMapping, ...]:
    """Returns the mappings of the layers of one stack, whose MLP is the last branch."""
    block, gate = f"{stack}.block.*.layer", "layers.*.mlp.gate"
    attention, cross, mlp = f"{block}.0", f"{block}.1", f"{block}.{num_branches - 1}"
    names = {"q": "q", "k": "k", "v": "v", "out": "o"}
    rows = {
        "layers.*.attention_norm": f"{attention}.layer_norm",
        **{f"layers.*.attention.{ours}": f"{attention}.SelfAttention.{name}" for ours, name in names.items()},
        "layers.*.cross_attention_norm": f"{cross}.layer_norm",
        **{f"layers.*.cross_attention.{ours}": f"{cross}.EncDecAttention.{name}" for ours, name in names.items()},
        "layers.*.mlp_norm": f"{mlp}.layer_norm",
        gate: f"{mlp}.DenseReluDense.wi_0",
        "layers.*.mlp.down": f"{mlp}.DenseReluDense.wo",
    }
    return (
        *(ModuleMapping((ours,), theirs, stack=stack) for ours, theirs in rows.items()),
        ModuleMapping(("layers.*.mlp.up",), f"{mlp}.DenseReluDense.wi_1", stack=stack, beside=gate),
        ModuleMapping(("layers.*.mlp.up",), f"{mlp}.DenseReluDense.wi", stack=stack, not_beside=gate),
    )


_MAPPINGS = (
    ModuleMapping(("embedding",), "shared"),
    ModuleMapping(("encoder_bias",), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
    *_layers("encoder", 2),
    ModuleMapping(("encoder_norm",), "encoder.final_layer_norm"),
    ModuleMapping(("decoder_bias",), "decoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
    *_layers("decoder", 3),
    ModuleMapping(("norm",), "decoder.final_layer_norm"),
    ModuleMapping(("head",), "lm_head"),
)


_DEFAULTS_OF_T5: Mapping[str, Any] = {
    "num_layers": 6,
    "num_heads": 8,
    "d_ff": 2048,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
}
_DEFAULTS_OF_MT5: Mapping[str, Any] = {
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "vocab_size": 250112,
    "feed_forward_proj": "gated-gelu",
}


def _encoder_decoder(config: Translation, defaults: Mapping[str, Any]) -> None:
    """Translates what all of them have in common; `defaults` are transformers' where these differ."""
    config.also(d_model="hidden_size", num_heads="num_attention_heads", num_layers="num_hidden_layers", d_kv="head_dim")
    for setting, (key, default) in {
        "encoder_num_layers": ("num_layers", defaults["num_layers"]),
        "hidden_size": ("d_model", 512),
        "num_attention_heads": ("num_heads", defaults["num_heads"]),
        "kv_channels": ("d_kv", 64),
        "ffn_hidden_size": ("d_ff", defaults["d_ff"]),
        "vocab_size": ("vocab_size", defaults["vocab_size"]),
        "relative_attention_num_buckets": ("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": ("relative_attention_max_distance", 128),
        "norm_epsilon": ("layer_norm_epsilon", 1e-6),
        "max_position_embeddings": ("n_positions", 512),
    }.items():
        config.copy(setting, key, default, needed=True)
    _decoder_layers(config)
    config.copy("hidden_dropout", "dropout_rate", 0.1)
    config.convert(("attention_dropout",), lambda keys: ({"attention_dropout": keys["dropout_rate"]}, []))
    heads(config)
    no_biases(config)
    _activation(config, defaults["feed_forward_proj"])
    config.only(is_encoder_decoder=True, is_decoder=False)
    config.always(
        position_embedding_type=RELATIVE_POSITIONS,
        normalization="RMSNorm",
        apply_layernorm_1p=False,
        qk_layernorm=False,
        scale_embeddings=False,
        residual_branches="sequential",
        softmax_scale=1.0,
    )


def _decoder_layers(config: Translation) -> None:
    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        encoder, given = config.setting("encoder_num_layers"), keys["num_decoder_layers"]
        decoder = encoder if given is None else given
        if not is_count(decoder, 1) or decoder > MAX_LAYERS:
            rule = "is not a positive whole number of layers"
            return {}, [Problem("num_decoder_layers", f"{decoder!r:.40}", rule, "Correct config.json.")]
        return {"decoder_num_layers": decoder, "num_layers": encoder + decoder}, []

    config.convert(
        {"decoder_num_layers": "num_decoder_layers", "num_layers": ""},
        read,
        lambda spec: {"num_decoder_layers": spec.config.decoder_num_layers},
        num_decoder_layers=None,
    )


def _activation(config: Translation, default: str) -> None:
    """Translates `feed_forward_proj`; what transformers makes of it is in its files too, and counts more."""
    written = {ours: theirs for names in (PLAIN, _GATED) for theirs, ours in reversed(list(names.items()))}

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        kind = keys["feed_forward_proj"]
        gate, _, name = kind.rpartition("-") if isinstance(kind, str) else ("?", "", "")
        gated = gate == "gated" if keys["is_gated_act"] is None else keys["is_gated_act"]
        name = keys["dense_act_fn"] or ("gelu_new" if kind == "gated-gelu" else name)
        names = _GATED if gated else PLAIN
        if gate in ("", "gated") and isinstance(name, str) and name in names:
            return {"activation": names[name]}, []
        rule = f"is not one of {', '.join(PLAIN)}, alone or as in gated-gelu"
        return {}, [Problem("feed_forward_proj", f"{kind!r:.40} ({name!s:.40})", rule, "Use another model.")]

    def write(spec: ModelSpec) -> Keys:
        ours = spec.config.activation
        gated, name = ours in GATED_ACTIVATIONS, written[ours]
        kind = "gelu" if ours == "geglu_tanh" else name
        return {"feed_forward_proj": f"gated-{kind}" if gated else kind, "dense_act_fn": name, "is_gated_act": gated}

    keys = {"feed_forward_proj": default, "dense_act_fn": None, "is_gated_act": None}
    config.convert({"activation": "feed_forward_proj"}, read, write, **keys)
    # transformers 4 has the approximation wherever a gate has a GELU.
    config.expect("activation", ", ".join(written), lambda spec: spec.config.activation in set(written) - {"geglu"})


def _t5(config: Translation) -> None:
    _encoder_decoder(config, _DEFAULTS_OF_T5)

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        scaled, tied = keys["scale_decoder_outputs"], keys["tie_word_embeddings"]
        scaled = tied if scaled is None else scaled
        scaling = sqrt(config.setting("hidden_size")) if scaled else 1.0
        return {_UNTIED: not scaled, "logits_scaling": scaling}, []

    def write(spec: ModelSpec) -> Keys:
        tied = not spec.config.untie_embeddings_and_output_weights
        return {"tie_word_embeddings": tied, "scale_decoder_outputs": spec.config.logits_scaling != 1.0}

    config.convert((_UNTIED, "logits_scaling"), read, write, tie_word_embeddings=True, scale_decoder_outputs=None)
    config.expect("logits_scaling", "1, or for a tied head the root of the width", _has_scaling_of_t5)


def _has_scaling_of_t5(spec: ModelSpec) -> bool:
    model = spec.config
    tied = not model.untie_embeddings_and_output_weights
    return model.logits_scaling == 1.0 or (tied and isclose(model.logits_scaling, sqrt(model.hidden_size)))


def _mt5(config: Translation) -> None:
    _encoder_decoder(config, _DEFAULTS_OF_MT5)
    config.convert(
        (_UNTIED,),
        lambda keys: ({_UNTIED: True}, []),
        lambda spec: {"tie_word_embeddings": not spec.config.untie_embeddings_and_output_weights},
        tie_word_embeddings=True,
    )
    config.always(logits_scaling=1.0)


def tie_missing_head(values: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Returns ModelConfig values with a tied head, if the folder of an encoder-decoder has none.

    >>> tie_missing_head({"model_type": "t5", "untie_embeddings_and_output_weights": True}, ["shared.weight"])
    {'model_type': 't5', 'untie_embeddings_and_output_weights': False}
    """
    if values.get("model_type") != ENCODER_DECODER_MODEL or "lm_head.weight" in names:
        return dict(values)
    return {**values, _UNTIED: False}


_IGNORED = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    models="T5, T5 1.1, Flan-T5, UL2",
    what_differs="an encoder and a decoder: relative positions, cross-attention, scores without a scale",
    translate=_t5,
    mappings=_MAPPINGS,
    prefix="",
    ignored_tensors=_IGNORED,
    model_type=ENCODER_DECODER_MODEL,
)
MT5 = Family(
    name="mt5",
    architecture="MT5ForConditionalGeneration",
    models="mT5",
    what_differs="a T5 whose output is never scaled",
    translate=_mt5,
    mappings=_MAPPINGS,
    prefix="",
    ignored_tensors=_IGNORED,
    model_type=ENCODER_DECODER_MODEL,
)
