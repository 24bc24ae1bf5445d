"""Finds the Hugging Face family that a config.json names, and what it says of the files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petatron.base.errors import ConfigError, Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.fields import flag_name
from petatron.models.hf.config_translation import ConfigReader
from petatron.models.hf.families import FAMILIES as ALL_FAMILIES
from petatron.models.hf.family import Family
from petatron.models.hf.rope_config_json import rope_keys

FAMILIES: Mapping[str, Family] = {family.name: family for family in ALL_FAMILIES}


# Keys that say nothing of the mathematics, or that every family reads.
_COMMON_KEYS = (
    *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "torch_dtype", "dtype"),
    *("rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "return_dict", "output_attentions"),
    *("output_hidden_states", "chunk_size_feed_forward", "problem_type", "id2label", "label2id", "is_encoder_decoder"),
    *(
        "use_cache",
        "pretraining_tp",
        "classifier_dropout",
        "router_aux_loss_coef",
        "output_router_logits",
        "is_decoder",
    ),
)
_MAX_NAMED = 8


def get_family(name: str) -> Family:
    """Returns a family by name."""
    name = _first_name(name)
    if name not in FAMILIES:
        raise ConfigError([_unknown_family(name, {})])
    return FAMILIES[name]


def family_name_of_config(config: Mapping[str, Any]) -> str:
    """Returns the family that the content of a config.json names; the error about one that is not here names the nearest.

    >>> family_name_of_config({"model_type": "qwen3"})
    'qwen3'
    """
    name = _first_name(str(config.get("model_type", "")))
    if name not in FAMILIES:
        raise ConfigError([_unknown_family(name, config)])
    if name == "mistral" and config.get("layer_types") is not None:
        return "ministral"  # published under the older name, and so transformers reads it
    return name


def has_separate_experts(config: Mapping[str, Any]) -> bool:
    """Whether the files of the family that a config.json names have tensors for each expert.

    >>> has_separate_experts({"model_type": "mixtral"}), has_separate_experts({"model_type": "granitemoe"})
    (True, False)
    """
    return any("#" in mapping.hf_module for mapping in get_family(family_name_of_config(config)).mappings)


def fp8_block_size(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block that has a scale, where config.json says that weights are in FP8 by blocks.

    >>> fp8_block_size({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}})
    (128, 128)
    """
    match hf_config.get("quantization_config"):
        case {"quant_method": "fp8", "weight_block_size": [rows, columns], **others} if (
            others.get("fmt", "e4m3") == "e4m3"
        ):
            return (rows, columns) if is_count(rows, 1) and is_count(columns, 1) else None
    return None


def has_mxfp4_weights(hf_config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are in MXFP4, as those of gpt-oss.

    >>> has_mxfp4_weights({"quantization_config": {"quant_method": "mxfp4"}})
    True
    """
    match hf_config.get("quantization_config"):
        case {"quant_method": "mxfp4"}:
            return True
    return False


def keys_of_flags(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys by which a config.json says what flags of ours do; none for a family that is not here.

    >>> keys_of_flags({"model_type": "gpt2"})["--num-attention-heads"]
    'n_head'
    """
    family = FAMILIES.get(_first_name(str(config.get("model_type", ""))))
    if family is None:
        return {}
    reader = _read_by(family, config)
    rope = rope_keys(config) if "rotary_base" in reader.names else {}
    names = {setting: key for setting, key in reader.names.items() if key}
    return {flag_name(setting): key for setting, key in {**rope, **names}.items()}


def _read_by(family: Family, config: Mapping[str, Any]) -> ConfigReader:
    reader = ConfigReader(family.name, config)
    family.translate(reader)
    return reader


def _first_name(name: str) -> str:
    """Returns the name of a family that has others too."""
    return next((family.name for family in ALL_FAMILIES if name in family.other_names), name)


def _unknown_family(name: str, config: Mapping[str, Any]) -> Problem:
    rule = "is not a family this version can read or write" if name else "is missing"
    fix = f"Families: {', '.join(FAMILIES)}."
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") in FAMILIES:
        inside = f"Its text model is a {text['model_type']}, which is one: save that by itself."
        return Problem("model_type", f'"{name}"', rule, f"{inside} {fix}")
    if name and _own_keys(config):
        fix = f"{_nearest_family(config)} {fix}"
    return Problem("model_type", f'"{name}"' if name else "", rule, fix)


def _nearest_family(config: Mapping[str, Any]) -> str:
    """Returns a sentence on the family with most keys in common with a config.json, and what differs."""
    keys = _own_keys(config)
    readers = [_read_by(family, config) for family in FAMILIES.values()]
    nearest = min(
        readers, key=lambda reader: len(keys ^ (set(reader.names.values()) - {""})) + len(keys - reader.keys())
    )
    missing = sorted(key for key in nearest.wrong if key not in config)
    extra = sorted(keys - nearest.keys())
    differences = [f"it lacks {_named(missing)}"] * bool(missing) + [f"it has {_named(extra)} besides"] * bool(extra)
    same = "config.json has the same settings, so what differs is in its code"
    return f"The nearest is {nearest.family}; {' and '.join(differences) or same}."


def _own_keys(config: Mapping[str, Any]) -> set[str]:
    """Returns the keys of settings that are set and that not every family has."""
    ids = {key for key in config if key.endswith("_token_id")}
    return {key for key, value in config.items() if value is not None} - ids - set(_COMMON_KEYS)


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
    return ", ".join(f"{key:.40}" for key in keys[:_MAX_NAMED]) + more
