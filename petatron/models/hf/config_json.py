"""Converts config.json of a Hugging Face model to the values of a `ModelConfig` and a `MoEConfig`, and back.

Most of it is the families' tables; here are the settings that are several keys on one side: heads, biases, dropout. Windows, rope and
experts have files of their own (`window_config_json.py`, `rope_config_json.py`, `moe_config_json.py`). Everything the decoder (or the
family) cannot express is a problem, and all problems are raised at once. A setting that matters only in training and that a family has
no key for, such as dropout in Llama, is left out when writing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.hybrid_pattern import ATTENTION, EXPERTS, branch_letters
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.model_identity import variant_defaults
from petatron.models.hf.check_claimed_counts import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, unsupported_setting
from petatron.models.hf.find_family import FAMILIES, family_name_of_config, fp8_block_size, has_mxfp4_weights
from petatron.models.hf.moe_config_json import (
    moe_from_hf_config,
    moe_to_hf_config,
    plain_moe_problems,
    unsupported_moe_settings,
)
from petatron.models.hf.rope_config_json import (
    latent_yarn_problems,
    rope_from_hf_config,
    rope_to_hf_config,
    unsupported_rope_type,
)
from petatron.models.hf.setting_types import stand_ins, wrong_types
from petatron.models.hf.window_config_json import windows_from_hf_config, windows_to_hf_config
from petatron.models.model_spec import ModelSpec

_COUNTS = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim",
)  # fmt: skip
_MAX_COUNTS = {"num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS, "linear_num_key_heads": MAX_HEADS}
_TRAINING_ONLY = ("hidden_dropout",)
# Parts of a model that a family does not have unless its tables name them.
_OPTIONAL_PARTS: Mapping[str, Any] = {
    "window_size": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    **variant_defaults(),
}
_EMBEDDING_DROPOUTS = {"embd_pdrop": "resid_pdrop", "embedding_dropout": "residual_dropout"}
_UNSUPPORTED_FIX = "Use another model; the decoder has no such part."


def from_hf_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ModelConfig and MoEConfig values from the content of a config.json; the second are empty for a dense model.

    The sequence length and the load-balancing loss are choices of the run and not among them.

    >>> values, _ = from_hf_config({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50})
    >>> values["num_layers"], values["ffn_hidden_size"], values["activation"]
    (2, 32, 'gelu_tanh')
    """
    family = FAMILIES[family_name_of_config(config)]
    full = {**family.defaults, **config}
    full |= {key: full[other] for key, other in family.aliases.items() if key not in config and other in config}
    problems = [*_spelling_conflicts(family, config), *_key_problems(family, full)]
    if problems:
        raise ConfigError([*problems, *_other_problems(family, full, {problem.where for problem in problems})])
    values, experts, problems = _read_settings(family, full)
    if problems:
        raise ConfigError(problems)
    return values, experts


def _spelling_conflicts(family: Family, config: Mapping[str, Any]) -> list[Problem]:
    """Returns settings that a file has in two spellings with two values; of which one counts, readers disagree."""
    pairs = [(key, other) for key, other in family.aliases.items() if None not in (config.get(key), config.get(other))]
    return [
        Problem(
            other,
            f"{config[other]!r:.40}",
            f"is another spelling of {key}, which is {config[key]!r:.40}",
            OWN_FOLDER_FIX,
        )
        for key, other in pairs
        if config[key] != config[other]
    ]


def _key_problems(family: Family, full: Mapping[str, Any]) -> list[Problem]:
    """Returns the keys that are missing or of another type, the pattern of a hybrid's layers among them."""
    layers, problems = _read_layers(family, full)
    # Whether layers that cannot be read have experts is not known either.
    family = replace(family, moe_keys={}) if problems else _without_unused_experts(family, layers)
    for check in (_missing_keys, wrong_types):
        named = {problem.where for problem in problems}
        problems += [problem for problem in check(family, full) if problem.where not in named]
    return problems


def _other_problems(family: Family, full: Mapping[str, Any], wrong: Collection[str]) -> list[Problem]:
    """Returns what is wrong besides some keys, whatever these would be: what is told with each of two values in their place."""
    keys = {where.partition(".")[0] for where in wrong}
    told: list[list[Problem]] = []
    for repaired in ({**full, **values} for values in stand_ins(family, keys)):
        if _key_problems(family, repaired):  # no value of a type stands for it
            return []
        told.append(_read_settings(family, repaired)[2])
    return [problem for problem in told[0] if problem in told[1] and problem.where not in wrong]


def _without_unused_experts(family: Family, layers: Mapping[str, Any]) -> Family:
    """Returns the family without experts for a hybrid that has none."""
    return replace(family, moe_keys={}) if layers and EXPERTS not in layers["hybrid_layer_pattern"] else family


def _read_settings(family: Family, full: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Returns ModelConfig and MoEConfig values of a config.json whose keys are there with their types, and what is wrong with it."""
    layers, _ = _read_layers(family, full)
    family = _without_unused_experts(family, layers)
    values: dict[str, Any] = {**family.fixed, **{ours: full[key] for ours, key in family.keys.items()}, **layers}
    values["untie_embeddings_and_output_weights"] = not full["tie_word_embeddings"]
    windows, problems = windows_from_hf_config(family, full, values["num_layers"])
    values |= {"window_size": None, **windows}
    for part, found in (
        _read_heads(family, full, values) if "num_attention_heads" in values else ({}, []),
        _read_activation(family, full) if family.activation_key else ({}, []),
        _read_biases(family, full),
        rope_from_hf_config(family, full, values) if family.has_rope else ({}, []),
        ({}, []) if family.read_more is None else family.read_more(full),
        _read_predictions(family, full),
        ({}, latent_yarn_problems(family, full) if values.get("multi_latent_attention") else []),
    ):
        values |= part
        problems += found
    experts, found = moe_from_hf_config(family, full, values["num_layers"])
    return values, experts, problems + found + _unsupported_values(family, full)


def _read_layers(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Reads the pattern of a hybrid's layers."""
    pattern = "" if family.hybrid is None else family.hybrid.read(hf_config)
    if isinstance(pattern, Problem):
        return {}, [pattern]
    if not pattern:
        return {}, []
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "is_hybrid_model": True}, []


def _missing_keys(family: Family, hf_config: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for ours, key in (*family.keys.items(), *family.moe_keys.items()):
        if key not in hf_config:
            rule = f"is missing, and a {family.name} config.json needs it"
            problems.append(Problem(key, "", rule, OWN_FOLDER_FIX))
        elif (ours in _COUNTS or ours in family.moe_keys) and not is_count(hf_config[key], 1):
            found = f"{hf_config[key]!r:.40}"
            problems.append(Problem(key, found, "is not a positive whole number", "Correct config.json."))
        elif ours in _MAX_COUNTS and hf_config[key] > _MAX_COUNTS[ours]:
            rule = f"is more than any model has ({_MAX_COUNTS[ours]:,})"
            problems.append(Problem(key, str(hf_config[key]), rule, "Correct config.json."))
    return problems


def _read_heads(
    family: Family, hf_config: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    width = values.get("kv_channels")
    if values.get("multi_latent_attention"):
        width = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
    if width is None and hidden % heads:
        rule = f"does not divide the width {hidden}, and no head_dim is given"
        return {}, [Problem("num_attention_heads", f"{heads}", rule, OWN_FOLDER_FIX)]
    given = hf_config.get("head_dim")
    if "kv_channels" not in family.keys and "qk_head_dim" not in values and given not in (None, hidden // heads):
        rule = f"is not hidden_size / num_attention_heads, and heads of a {family.name} model have no other width here"
        return {}, [Problem("head_dim", f"{given!r:.40}", rule, "Use another model.")]
    groups = values.get("num_query_groups") or heads
    return {
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": width or hidden // heads,
        "ffn_hidden_size": values.get("ffn_hidden_size") or 4 * hidden,
        "attention_dropout": values.get("attention_dropout") or 0.0,
    }, []


def _read_activation(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    name = hf_config[family.activation_key]
    if isinstance(name, str) and name in family.activations:
        return {"activation": family.activations[name]}, []
    known = ", ".join(family.activations)
    return {}, [
        Problem(family.activation_key, f'"{name!s:.40}"', "is not an activation the decoder has", f"It has {known}.")
    ]


def _read_predictions(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Reads the depths of multi-token prediction; whether the folder has their weights is not known here."""
    for key in family.mtp_keys:
        count = hf_config.get(key)
        if count is not None and (not is_count(count) or count > MAX_LAYERS):
            return {}, [Problem(key, f"{count!r:.40}", "is not a whole number of layers", "Correct config.json.")]
        if count is not None:
            return {"mtp_num_layers": count or None}, []
    return {"mtp_num_layers": None} if family.mtp_keys else {}, []


def _read_biases(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    if "mlp_bias" not in family.defaults or "mlp_bias" in family.single_values:
        return {}, []
    if hf_config["attention_bias"] == hf_config["mlp_bias"]:
        return {"add_bias_linear": bool(hf_config["mlp_bias"])}, []
    found = f"{hf_config['attention_bias']} and mlp_bias {hf_config['mlp_bias']}"
    return {}, [Problem("attention_bias", found, "differ, and the decoder has one switch for both", _UNSUPPORTED_FIX)]


def _unsupported_values(family: Family, hf_config: Mapping[str, Any]) -> list[Problem]:
    problems = [
        Problem(key, str(hf_config[key]), f"is not {value}, the only value the decoder can express", _UNSUPPORTED_FIX)
        for key, value in family.single_values.items()
        if _null_if_off(hf_config[key]) != _null_if_off(value)
    ]
    for embedding, residual in _EMBEDDING_DROPOUTS.items():
        if embedding in family.defaults and hf_config[embedding] != hf_config[residual]:
            rule = f"is not {residual} {hf_config[residual]}, and the decoder has one dropout for both"
            problems.append(Problem(embedding, str(hf_config[embedding]), rule, "Make them equal in config.json."))
    read = fp8_block_size(hf_config) is not None or has_mxfp4_weights(hf_config)
    if hf_config.get("quantization_config") and not read:
        rule = "says that the weights are quantized, and only plain ones, FP8 by blocks and MXFP4 can be read"
        problems.append(Problem("quantization_config", "", rule, "Use the model's unquantized weights."))
    return problems


def _null_if_off(value: object) -> object:
    """Returns null for a switch that is off: files have either."""
    return None if value is False else value


def matching_family(spec: ModelSpec) -> Family | None:
    """Returns the family whose names and config.json express the model, if one does."""
    family, problems = _closest_family(spec)
    return None if problems else family


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """Returns the content of a model's config.json; token ids are None, the tokenizer's owner fills them in.

    Raises `ConfigError` with the reasons if no family can express the model.

    >>> from petatron.validate import load_config
    >>> from petatron.models.registry import model_spec
    >>> run = load_config(["--vocab-size", "256"], preset="tiny-llama", require_training=False).config
    >>> to_hf_config(model_spec(run))["architectures"]
    ['LlamaForCausalLM']
    """
    model = spec.config
    family, problems = _closest_family(spec)
    if problems:
        raise ConfigError(problems)
    content: dict[str, Any] = {"model_type": family.name, "architectures": [family.architecture]}
    content |= {key: getattr(model, ours) for ours, key in family.keys.items()}
    if family.activation_key:
        content[family.activation_key] = _activation_names(family)[model.activation]
    if family.hybrid is not None and model.hybrid_layer_pattern is not None:
        content |= family.hybrid.write(model.hybrid_layer_pattern)
    content["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    content |= dict(family.single_values) | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    content |= {key: model.hidden_dropout for key in _EMBEDDING_DROPOUTS if key in family.defaults}
    if "mlp_bias" in family.defaults:
        content |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    content |= windows_to_hf_config(family, model)
    content |= dict.fromkeys(family.mtp_keys[:1], model.mtp_num_layers or 0)
    if family.has_rope:
        content |= rope_to_hf_config(family, model)
    content |= {} if family.write_more is None else family.write_more(spec)
    return content | ({} if spec.moe is None else moe_to_hf_config(family, spec.moe, spec))


def _closest_family(spec: ModelSpec) -> tuple[Family, list[Problem]]:
    """Returns the family closest to a model, the first of several, and the model's settings that it has no key for."""
    found = [(family, _unsupported_settings(spec, family)) for family in FAMILIES.values()]
    return min(found, key=lambda pair: len(pair[1]) + 10 * _structural_differences(spec, pair[0]))


_ALL_DIFFERENCES = 6
"""As many as a family that is no hybrid can have."""


def _structural_differences(spec: ModelSpec, family: Family) -> int:
    """Counts differences by which a family is another kind of model, however few settings say so."""
    pattern = spec.config.hybrid_layer_pattern
    if pattern is not None and family.hybrid is not None:  # whatever their positions and experts are
        return not re.fullmatch(family.hybrid.patterns, pattern)
    if pattern is not None or family.hybrid is not None:
        return _ALL_DIFFERENCES
    rotary = spec.config.position_embedding_type not in ("learned_absolute", "alibi")
    latent = family.fixed.get("multi_latent_attention", False) != spec.config.multi_latent_attention
    depths = spec.config.mtp_num_layers is not None and not family.mtp_keys
    linear = family.fixed.get("experimental_attention_variant") != spec.config.experimental_attention_variant
    experts = bool(family.moe_keys) != (spec.moe is not None)
    return (family.has_rope != rotary) + experts + latent + depths + 2 * linear


def _unsupported_settings(spec: ModelSpec, family: Family) -> list[Problem]:
    problems = _unsupported_by_family(spec.config, family)
    if family.unsupported is not None:
        problems += family.unsupported(spec)
    if spec.moe is not None and family.moe_keys:
        return problems + unsupported_moe_settings(family, spec.moe, spec)
    if spec.moe is not None:
        problems.append(unsupported_setting("num_experts", spec.moe.num_experts, family, "no experts"))
    if spec.moe is None and family.moe_keys and family.hybrid is None:
        problems += [unsupported_setting("num_experts", None, family, "always some"), *plain_moe_problems(family)]
    return problems


def _activation_names(family: Family) -> dict[str, str]:
    return {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}


def _unsupported_by_family(model: ModelConfig, family: Family) -> list[Problem]:
    problems = [
        unsupported_setting(name, getattr(model, name), family, f"only {value}")
        for name, value in family.fixed.items()
        if name not in _TRAINING_ONLY and getattr(model, name) != value
    ]
    if model.model_type != "decoder":
        problems.append(unsupported_setting("model_type", model.model_type, family, "only decoder"))
    pattern = model.hybrid_layer_pattern
    if (pattern is None) != (family.hybrid is None):
        allowed = "only layers with attention and MLP" if family.hybrid is None else "layers with one branch each"
        return [*problems, unsupported_setting("hybrid_layer_pattern", pattern, family, allowed)]
    if family.hybrid is not None and not re.fullmatch(family.hybrid.patterns, pattern or ""):
        problems.append(unsupported_setting("hybrid_layer_pattern", pattern, family, "layers in another order"))
    problems += [
        unsupported_setting(name, getattr(model, name), family, "no such part")
        for name, default in _OPTIONAL_PARTS.items()
        if getattr(model, name) != default and not _names_setting(family, name)
    ]
    problems += [
        unsupported_setting(name, getattr(model, name), family, "other ways")
        for name, values in family.unsupported_choices.items()
        if getattr(model, name) in values
    ]
    problems += [
        unsupported_setting(name, None, family, "always one")
        for name in family.required
        if getattr(model, name) is None
    ]
    if model.add_qkv_bias and not model.add_bias_linear and not _names_setting(family, "add_qkv_bias"):
        problems.append(unsupported_setting("add_qkv_bias", True, family, "biases everywhere or nowhere"))
    if family.heads_divide_width and model.hidden_size % model.num_attention_heads:
        problems.append(unsupported_setting("hidden_size", model.hidden_size, family, "a multiple of the heads"))
    optional = "position_embedding_type" in family.more_settings
    if family.has_rope and not optional and model.position_embedding_type not in ("rope", "yarn"):
        problems.append(
            unsupported_setting("position_embedding_type", model.position_embedding_type, family, "only rotary")
        )
    problems += unsupported_rope_type(family, model)
    scores_alone = model.yarn_mscale_all_dim and not model.yarn_mscale
    if model.multi_latent_attention and model.position_embedding_type == "yarn" and scores_alone:
        problems.append(unsupported_setting("yarn_mscale", model.yarn_mscale, family, "both mscales or neither"))
    if family.activation_key and model.activation not in _activation_names(family):
        known = ", ".join(_activation_names(family))
        problems.append(unsupported_setting("activation", model.activation, family, known))
    if pattern is not None and ATTENTION not in branch_letters(pattern):
        return problems
    if "num_query_groups" not in family.keys and model.num_query_groups != model.num_attention_heads:
        problems.append(unsupported_setting("num_query_groups", model.num_query_groups, family, "as many as heads"))
    own_width = model.hidden_size / model.num_attention_heads
    if "kv_channels" not in family.keys and not model.multi_latent_attention and model.kv_channels != own_width:
        problems.append(unsupported_setting("kv_channels", model.kv_channels, family, "only hidden size / heads"))
    return problems


def _names_setting(family: Family, name: str) -> bool:
    if name == "window_size":
        return "sliding_window" in family.defaults
    if name == "mtp_num_layers":
        return bool(family.mtp_keys)
    if name == "window_attn_skip_freq":
        return "layer_types" in family.defaults
    if name == "rotary_seq_len_interpolation_factor" or name.startswith("longrope_"):
        return family.has_rope
    if name == "rotary_base_local":
        return family.rope_by_layer_type
    return name in family.fixed or name in family.keys or name in family.more_settings
