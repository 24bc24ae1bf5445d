"""Translates the config.json keys that most families share: sizes, heads, activations, biases, dropout, latent attention, MTP depths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.sections.hybrid import ATTENTION, branch_symbols
from petatron.config.schema.sections.mlp import ActivationName
from petatron.models.hf.check_claimed_counts import MAX_LAYERS
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import OTHER_MODEL_FIX, REQUIRED, Keys, Settings, Translation
from petatron.models.model_spec import ModelSpec

_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
_LLAMA_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
GATED: Mapping[str, ActivationName] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}
SILU_ALONE: Mapping[str, ActivationName] = {"silu": "swiglu", "swish": "swiglu"}
"""Of families whose recurrent layers have the same activation, which is SiLU in ours."""
PLAIN: Mapping[str, ActivationName] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}
SQUARED_RELU: Mapping[str, ActivationName] = {"relu2": "squared_relu", "relu": "relu", "gelu": "gelu", "silu": "silu"}


def llama(
    config: Translation,
    *,
    without: Collection[str] = (),
    activations: Mapping[str, ActivationName] = GATED,
    hidden_act: str = "silu",
    heads_divide_width: bool = False,
    **defaults: Any,
) -> None:
    """Translates sizes, norms and activation as in a Llama, but for the keys `without`; `defaults` are those that differ from Llama's."""
    assert defaults.keys() <= {*_LLAMA_KEYS.values(), "tie_word_embeddings"}
    defaults = {**_LLAMA_DEFAULTS, **defaults}
    for setting, key in _LLAMA_KEYS.items():
        if key not in without:
            config.copy(setting, key, defaults.get(key, REQUIRED))
    llama_layers(config)
    if "tie_word_embeddings" not in without:
        tied_embeddings(config, defaults["tie_word_embeddings"])
    heads(config, divide_width=heads_divide_width)
    if "hidden_act" not in without:
        activation(config, "hidden_act", hidden_act, activations)


def llama_layers(config: Translation) -> None:
    """Says what layers of a Llama are, and most others."""
    config.always(
        apply_layernorm_1p=False,
        scale_embeddings=False,
        normalization="RMSNorm",
        qk_layernorm=False,
        hidden_dropout=0.0,
    )


def no_biases(config: Translation) -> None:
    config.always(add_bias_linear=False, add_qkv_bias=False)


def tied_embeddings(config: Translation, default: bool) -> None:
    name, key = "untie_embeddings_and_output_weights", "tie_word_embeddings"
    config.convert(
        (name,),
        lambda keys: ({name: not keys[key]}, []),
        lambda spec: {key: not spec.config.untie_embeddings_and_output_weights},
        tie_word_embeddings=default,
    )


def heads(config: Translation, *, divide_width: bool = False) -> None:
    """Checks heads, and derives what sizes leave open. divide_width: whether transformers refuses a width that is no multiple of them."""
    config.convert(("group_query_attention",), lambda keys: _read_heads(config, keys))
    if divide_width:
        config.expect(
            "hidden_size",
            "a multiple of the heads",
            lambda spec: spec.config.hidden_size % spec.config.num_attention_heads == 0,
        )
    if "num_query_groups" not in config.names:
        config.expect(
            "num_query_groups",
            "as many as heads",
            lambda spec: _without_attention(spec) or spec.config.num_query_groups == spec.config.num_attention_heads,
        )
    if "kv_channels" not in config.names:
        config.expect("kv_channels", "only hidden size / heads", _has_common_width)


def _without_attention(spec: ModelSpec) -> bool:
    pattern = spec.config.hybrid_layer_pattern
    return pattern is not None and ATTENTION not in branch_symbols(pattern)


def _has_common_width(spec: ModelSpec) -> bool:
    model = spec.config
    any_width = _without_attention(spec) or model.multi_latent_attention
    return any_width or model.kv_channels == model.hidden_size / model.num_attention_heads


def _read_heads(config: Translation, keys: Keys) -> tuple[Settings, list[Problem]]:
    num_heads, hidden, width = (config.setting(name) for name in ("num_attention_heads", "hidden_size", "kv_channels"))
    latent = config.setting("multi_latent_attention")
    if latent:
        width = config.setting("qk_head_dim") + config.setting("qk_pos_emb_head_dim")
    if width is None and hidden % num_heads:
        rule = f"does not divide the width {hidden}, and no head_dim is given"
        return {}, [Problem("num_attention_heads", f"{num_heads}", rule, OWN_FOLDER_FIX)]
    given = keys.get("head_dim")
    if "kv_channels" not in config.names and not latent and given not in (None, hidden // num_heads):
        other = f"heads of a {config.family} model have no other width here"
        rule = f"is not hidden_size / num_attention_heads, and {other}"
        return {}, [Problem("head_dim", f"{given!r:.40}", rule, "Use another model.")]
    groups = config.setting("num_query_groups") or num_heads
    return {
        "num_query_groups": groups,
        "group_query_attention": groups != num_heads,
        "kv_channels": width or hidden // num_heads,
        "ffn_hidden_size": config.setting("ffn_hidden_size") or 4 * hidden,
        "attention_dropout": config.setting("attention_dropout") or 0.0,
    }, []


def activation(config: Translation, key: str, default: str, names: Mapping[str, ActivationName]) -> None:
    """Translates an activation by its names there and here; the first of several for one of ours is the one written."""
    written = {ours: theirs for theirs, ours in reversed(list(names.items()))}

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        name = keys[key]
        if isinstance(name, str) and name in names:
            return {"activation": names[name]}, []
        rule = "is not an activation the decoder has"
        return {}, [Problem(key, f'"{name!s:.40}"', rule, f"It has {', '.join(names)}.")]

    config.convert({"activation": key}, read, lambda spec: {key: written[spec.config.activation]}, **{key: default})
    config.expect("activation", ", ".join(written), lambda spec: spec.config.activation in written)


def biases(config: Translation) -> None:
    """Translates `attention_bias` and `mlp_bias`, which are one switch of ours."""

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        attention, mlp = keys["attention_bias"], keys["mlp_bias"]
        if attention == mlp:
            return {"add_bias_linear": bool(mlp)}, []
        rule = "differ, and the decoder has one switch for both"
        return {}, [Problem("attention_bias", f"{attention} and mlp_bias {mlp}", rule, OTHER_MODEL_FIX)]

    def write(spec: ModelSpec) -> Keys:
        return dict.fromkeys(("attention_bias", "mlp_bias"), spec.config.add_bias_linear)

    config.convert(("add_bias_linear",), read, write, attention_bias=False, mlp_bias=False)


def dropouts(config: Translation, residual_key: str, embedding_key: str, default: float) -> None:
    """Translates the dropouts of residuals and embeddings, which are one of ours."""

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        embedding, residual = keys[embedding_key], keys[residual_key]
        if embedding == residual:
            return {}, []
        rule = f"is not {residual_key} {residual}, and the decoder has one dropout for both"
        return {}, [Problem(embedding_key, str(embedding), rule, "Make them equal in config.json.")]

    config.copy("hidden_dropout", residual_key, default)
    keys = {residual_key: default, embedding_key: default}
    config.convert((), read, lambda spec: {embedding_key: spec.config.hidden_dropout}, **keys)


def latent_attention(config: Translation, *, q_lora_rank: int | None) -> None:
    """Translates the ranks and widths of latent attention."""
    config.copy_same(q_lora_rank=q_lora_rank, kv_lora_rank=512, v_head_dim=128)
    config.copy("qk_head_dim", "qk_nope_head_dim", 128)
    config.copy("qk_pos_emb_head_dim", "qk_rope_head_dim", 64)
    config.always(multi_latent_attention=True)


def predictions(config: Translation) -> None:
    """Translates the depths of multi-token prediction; whether a folder has their weights is not known here."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")

    def read(keys: Keys) -> tuple[Settings, list[Problem]]:
        key, count = next(((key, keys[key]) for key in names if keys.get(key) is not None), (names[0], 0))
        if is_count(count) and count <= MAX_LAYERS:
            return {"mtp_num_layers": count or None}, []
        return {}, [Problem(key, f"{count!r:.40}", "is not a whole number of layers", "Correct config.json.")]

    config.convert(("mtp_num_layers",), read, lambda spec: {names[0]: spec.config.mtp_num_layers or 0})
