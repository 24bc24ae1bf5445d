"""Converts config.json of a Hugging Face model to the values of a `ModelConfig` and a `MoEConfig`, and back.

Most of it is the families' tables; here are the settings that are several keys on one side: heads, the sliding window, biases,
dropout. The experts have a file of their own, `moe_config_json.py`. Everything the decoder (or the family) cannot express is a
problem, and all problems are raised at once. A setting that matters only in training and that a family has no key for, such as
dropout in Llama, is left out when writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import ModelConfig
from petatron.models.hf.check_claimed_counts import MAX_EXPERTS, MAX_LAYERS
from petatron.models.hf.family import Family
from petatron.models.hf.find_family import FAMILIES, family_name_for_model, family_name_of_config
from petatron.models.hf.moe_config_json import (
    moe_from_hf_config,
    moe_to_hf_config,
    unsupported_moe_settings,
    unsupported_setting,
)
from petatron.models.hf.rope_config_json import rope_from_hf_config, rope_to_hf_config
from petatron.models.hf.setting_types import wrong_types
from petatron.models.model_spec import ModelSpec

_COUNTS = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_MAX_COUNTS = {"num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}
_TRAINING_ONLY = ("hidden_dropout",)
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
    full |= {key: full[other] for key, other in family.aliases.items() if key not in full and other in full}
    problems = _missing_keys(family, full)
    named = {problem.where for problem in problems}
    problems += [problem for problem in wrong_types(family, full) if problem.where not in named]
    if problems:
        raise ConfigError(problems)
    values: dict[str, Any] = {**family.fixed, **{ours: full[key] for ours, key in family.keys.items()}}
    values["untie_embeddings_and_output_weights"] = not full["tie_word_embeddings"]
    for part, found in (
        _read_heads(values),
        _read_activation(family, full),
        _read_window(family, full, values["num_layers"]),
        _read_biases(family, full),
        rope_from_hf_config(full, values["max_position_embeddings"]) if "rotary_percent" in family.fixed else ({}, []),
    ):
        values |= part
        problems += found
    experts, found = moe_from_hf_config(family, full, values["num_layers"])
    problems += found + _unsupported_values(family, full)
    if problems:
        raise ConfigError(problems)
    return values, experts


def _missing_keys(family: Family, hf_config: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for ours, key in (*family.keys.items(), *family.moe_keys.items()):
        if key not in hf_config:
            rule = f"is missing, and a {family.name} config.json needs it"
            problems.append(Problem(key, "", rule, "Take config.json from the model's own folder."))
        elif (ours in _COUNTS or ours in family.moe_keys) and not is_count(hf_config[key], 1):
            found = f"{hf_config[key]!r:.40}"
            problems.append(Problem(key, found, "is not a positive whole number", "Correct config.json."))
        elif ours in _MAX_COUNTS and hf_config[key] > _MAX_COUNTS[ours]:
            rule = f"is more than any model has ({_MAX_COUNTS[ours]:,})"
            problems.append(Problem(key, str(hf_config[key]), rule, "Correct config.json."))
    return problems


def _read_heads(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    width = values.get("kv_channels")
    if width is None and hidden % heads:
        rule = f"does not divide the width {hidden}, and no head_dim is given"
        return {}, [Problem("num_attention_heads", f"{heads}", rule, "Take config.json from the model's own folder.")]
    groups = values.get("num_query_groups") or heads
    return {
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": width or hidden // heads,
        "ffn_hidden_size": values["ffn_hidden_size"] or 4 * hidden,
        "attention_dropout": values["attention_dropout"] or 0.0,
    }, []


def _read_activation(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    name = hf_config[family.activation_key]
    if name in family.activations:
        return {"activation": family.activations[name]}, []
    known = ", ".join(family.activations)
    return {}, [Problem(family.activation_key, f'"{name}"', "is not an activation the decoder has", f"It has {known}.")]


def _read_window(family: Family, hf_config: Mapping[str, Any], num_layers: int) -> tuple[dict[str, Any], list[Problem]]:
    """Reads the window: Mistral has one in every layer, Qwen in those from `max_window_layers` on or named by `layer_types`."""
    window = hf_config["sliding_window"] if "sliding_window" in family.defaults else None
    if "use_sliding_window" in family.defaults and not hf_config["use_sliding_window"]:
        window = None
    counted = "max_window_layers" in family.defaults
    if window is not None and not counted and "layer_types" in family.defaults and not hf_config["layer_types"]:
        rule = "is missing, and a sliding window in some layers cannot be told from one in all"
        return {}, [Problem("layer_types", "", rule, "Name the kind of every layer in config.json.")]
    first = num_layers if window is None else hf_config["max_window_layers"] if counted else 0
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = set(hf_config.get("layer_types") or default)
    if kinds == {"full_attention"}:
        return {"window_size": None}, []
    if kinds == {"sliding_attention"} and window is not None:
        return {"window_size": window}, []
    rule = f"with sliding_window {window} is not one kind of attention for all layers, which is what the decoder has"
    return {}, [Problem("layer_types", " and ".join(sorted(kinds)), rule, _UNSUPPORTED_FIX)]


def _read_biases(family: Family, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    if "mlp_bias" not in family.defaults:
        return {}, []
    if hf_config["attention_bias"] == hf_config["mlp_bias"]:
        return {"add_bias_linear": bool(hf_config["mlp_bias"])}, []
    found = f"{hf_config['attention_bias']} and mlp_bias {hf_config['mlp_bias']}"
    return {}, [Problem("attention_bias", found, "differ, and the decoder has one switch for both", _UNSUPPORTED_FIX)]


def _unsupported_values(family: Family, hf_config: Mapping[str, Any]) -> list[Problem]:
    problems = [
        Problem(key, str(hf_config[key]), f"is not {value}, the only value the decoder can express", _UNSUPPORTED_FIX)
        for key, value in family.single_values.items()
        if hf_config[key] != value
    ]
    if hf_config.get("embd_pdrop") != hf_config.get("resid_pdrop"):
        rule = f"is not resid_pdrop {hf_config.get('resid_pdrop')}, and the decoder has one dropout for both"
        problems.append(
            Problem("embd_pdrop", str(hf_config.get("embd_pdrop")), rule, "Make them equal in config.json.")
        )
    if hf_config.get("quantization_config"):
        rule = "says that the weights are quantized, and only plain ones can be read"
        problems.append(Problem("quantization_config", "", rule, "Use the model's unquantized weights."))
    return problems


def matching_family(spec: ModelSpec) -> Family | None:
    """Returns the family whose names and config.json express the model, if one does."""
    family, problems = _closest_family(spec)
    return None if problems else family


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """Returns the content of a model's config.json; token ids are None, the tokenizer's owner fills them in.

    Raises `ConfigError` with the reasons if no family can express the model.

    >>> from petatron.config import load_config
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
    content[family.activation_key] = _activation_names(family)[model.activation]
    content["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    content |= dict(family.single_values) | {"bos_token_id": None, "eos_token_id": None}
    if "embd_pdrop" in family.defaults:
        content["embd_pdrop"] = model.hidden_dropout
    if "mlp_bias" in family.defaults:
        content |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    content |= _window_keys(family, model)
    if "rotary_percent" in family.fixed:
        content |= rope_to_hf_config(model)
    return content | ({} if spec.moe is None else moe_to_hf_config(family, spec.moe, spec))


def _closest_family(spec: ModelSpec) -> tuple[Family, list[Problem]]:
    """Returns the family closest to a model, and the model's settings that it has no key for."""
    family = FAMILIES[family_name_for_model(spec.config, spec.moe)]
    problems = _unsupported_by_family(spec.config, family)
    return family, problems if spec.moe is None else problems + unsupported_moe_settings(family, spec.moe, spec)


def _window_keys(family: Family, model: ModelConfig) -> dict[str, Any]:
    kind = "full_attention" if model.window_size is None else "sliding_attention"
    content = {
        "sliding_window": model.window_size,
        "use_sliding_window": model.window_size is not None,
        "max_window_layers": 0,
        "layer_types": [kind] * model.num_layers,
    }
    return {key: value for key, value in content.items() if key in family.defaults}


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
    if model.multi_latent_attention:
        problems.append(
            unsupported_setting("multi_latent_attention", "", family, "only heads with keys and values of their own")
        )
    if model.hybrid_layer_pattern is not None:
        problems.append(
            unsupported_setting(
                "hybrid_layer_pattern", model.hybrid_layer_pattern, family, "only layers with attention and MLP"
            )
        )
    if "rotary_percent" in family.fixed and model.position_embedding_type not in ("rope", "yarn"):
        problems.append(
            unsupported_setting("position_embedding_type", model.position_embedding_type, family, "only rotary")
        )
    if model.activation not in _activation_names(family):
        known = ", ".join(_activation_names(family))
        problems.append(unsupported_setting("activation", model.activation, family, known))
    if "num_query_groups" not in family.keys and model.num_query_groups != model.num_attention_heads:
        problems.append(unsupported_setting("num_query_groups", model.num_query_groups, family, "as many as heads"))
    if "kv_channels" not in family.keys and model.kv_channels != model.hidden_size / model.num_attention_heads:
        problems.append(unsupported_setting("kv_channels", model.kv_channels, family, "only hidden size / heads"))
    return problems
