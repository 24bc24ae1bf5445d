"""Converts the rope settings of config.json, in the spelling of transformers 5 (`rope_parameters`) and that before (`rope_theta` and
`rope_scaling`), to ours and back.

YaRN's temperature has two spellings there: `mscale` and `mscale_all_dim`, which count only together, or the number itself,
`attention_factor`. Ours is (0.1 mscale ln f + 1) / (0.1 mscale_all_dim ln f + 1), which covers both: a given temperature t is
mscale = (t - 1) / (0.1 ln f).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.longrope_factors import format_longrope_factors, is_factor, parse_longrope_factors
from petatron.config.schema.model import ModelConfig
from petatron.layers.rope import yarn_attention_scaling
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, unsupported_setting
from petatron.models.hf.window_config_json import FULL, SLIDING

_DEFAULT_THETA = 10000.0
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_CONTEXT_TYPES = ("llama3", "yarn", "longrope")
"""Kinds of scaling that begin at the context of pretraining."""


def rope_from_hf_config(
    family: Family, hf_config: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns ModelConfig values, and what the decoder cannot express; `model` has those read so far."""
    key, given = _rope_table(family, hf_config)
    local: dict[str, Any] = {}
    if family.rope_by_layer_type:
        given, local, problems = _split_by_layer_type(family, hf_config)
        if problems:
            return {}, problems
    kind = family.rope_types.get(_rope_type(given))
    theta = given.get("rope_theta", hf_config.get("rope_theta", _DEFAULT_THETA))
    part = given.get(_PARTIAL, hf_config.get(_PARTIAL))
    problems = _unsupported_rope(family, key, given)
    if theta is None:
        problems.append(Problem("rope_theta", "None", "is not a number", OWN_FOLDER_FIX))
    problems += _part_problems(family, part, hf_config.get(_PARTIAL))
    if problems or theta is None:
        return {}, problems
    values: dict[str, Any] = {"rotary_base": float(theta), "position_embedding_type": "rope"}
    values |= {"rotary_percent": float(part or 0.0)} if _PARTIAL in family.defaults else {}
    if local and model["window_size"] is not None and (kind != "default" or local["rope_theta"] != theta):
        values["rotary_base_local"] = float(local["rope_theta"])
    if kind == "default":
        return values, []
    if kind in _CONTEXT_TYPES and hf_config.get(_ORIGINAL) is not None and not local:
        given = {**given, _ORIGINAL: hf_config[_ORIGINAL]}  # the key of the model itself counts more
    if kind == "longrope":
        scaling, problems = _longrope_from_hf(key, given, model["max_position_embeddings"])
    else:
        scaling, problems = _scaling_from_hf(key, str(kind), given, model["max_position_embeddings"])
    return values | scaling, problems


def _part_problems(family: Family, part: object, own: object) -> list[Problem]:
    """Returns what is wrong with the part of each head that is rotated, by the table or by the model's own key."""
    if _PARTIAL not in family.defaults and part not in (None, 1, 1.0):
        rule = "rotates a part of each head, which this family does not do"
        return [Problem(_PARTIAL, str(part), rule, "Remove it, or use 1.0.")]
    if _PARTIAL in family.defaults and part is None:
        return [Problem(_PARTIAL, "None", "is not a number", OWN_FOLDER_FIX)]
    only = family.fixed.get("rotary_percent")
    wrong = [value for value in (part, own) if only is not None and _PARTIAL in family.defaults and value != only]
    rule = f"is not {only}, the only value that transformers has for a {family.name} model"
    return [Problem(_PARTIAL, str(value), rule, "Use another model.") for value in wrong[:1]]


def _rope_table(family: Family, hf_config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the table of rope settings and its key; of two tables `rope_scaling` counts, as in transformers.

    Model cards tell their readers to add `rope_scaling` to a config.json for longer contexts, whichever spelling that has.
    """
    if hf_config.get("rope_scaling"):
        return "rope_scaling", hf_config["rope_scaling"]
    return "rope_parameters", hf_config.get("rope_parameters") or family.defaults.get("rope_parameters") or {}


def _rope_type(table: Mapping[str, Any]) -> str:
    return str(table.get("rope_type", table.get("type", "default")))


def _split_by_layer_type(
    family: Family, hf_config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any], list[Problem]]:
    """Returns the settings of layers without and with a window; the second are not scaled."""
    tables = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or {}
    full = {**(tables.get(FULL) or {}), **scaling}
    local = dict(tables.get(SLIDING) or {})
    theta, usual = hf_config.get("rope_theta", _DEFAULT_THETA), family.defaults.get("rope_theta")
    problems: list[Problem] = []
    if scaling and "rope_type" not in scaling:
        rule = f"counts in transformers 4, and not in 5, which reads rope_type alone in a {family.name} model"
        problems.append(Problem("rope_scaling.type", f"{scaling.get('type')!r:.40}", rule, "Write rope_type instead."))
    if "rope_theta" not in local and "rope_local_base_freq" not in family.defaults and theta != usual:
        rule = f"is that of all layers in transformers 4, and of {FULL} alone in 5, where {SLIDING} has {usual}"
        problems.append(Problem("rope_theta", str(theta), rule, f"Say rope_parameters.{SLIDING}.rope_theta."))
    local.setdefault("rope_theta", hf_config.get("rope_local_base_freq", theta))
    if set(tables) - {FULL, SLIDING}:
        rule = f"is not a table of {FULL} and one of {SLIDING}, which a {family.name} model has"
        problems.append(Problem("rope_parameters", "", rule, OWN_FOLDER_FIX))
    if _rope_type(full) == "yarn" and not full.get("truncate", True):
        rule = f"is not read by transformers within {FULL}"
        problems.append(Problem(f"rope_parameters.{FULL}.truncate", "False", rule, "Remove it."))
    if _rope_type(local) != "default":
        rule = "scales the rotation of layers with a window, which the decoder does not"
        problems.append(Problem(f"rope_parameters.{SLIDING}", "", rule, "Use another model."))
    if local["rope_theta"] is None:
        problems.append(Problem(f"rope_parameters.{SLIDING}.rope_theta", "None", "is not a number", OWN_FOLDER_FIX))
    return full, local, problems


def _scaling_from_hf(
    key: str, kind: str, given: Mapping[str, Any], max_position_embeddings: int
) -> tuple[dict[str, Any], list[Problem]]:
    original = given.get("original_max_position_embeddings") or max_position_embeddings
    factor = given.get("factor") or (max_position_embeddings / original if kind == "yarn" else None)
    if factor is None or (kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= given.keys()):
        rule = "lacks one of factor, low_freq_factor, high_freq_factor"
        return {}, [Problem(key, f'of type "{kind}"', rule, OWN_FOLDER_FIX)]
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": float(factor)}, []
    values: dict[str, Any] = {"rope_scaling_factor": float(factor), "original_max_position_embeddings": int(original)}
    if kind == "llama3":
        values["use_rope_scaling"] = True
        values |= {f"rope_{name}": float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}
        return values, []
    scales, problems = _yarn_mscale_from_hf(key, given, float(factor))
    values["position_embedding_type"] = "yarn"
    values["yarn_beta_fast"] = float(given.get("beta_fast") or 32)
    values["yarn_beta_slow"] = float(given.get("beta_slow") or 1)
    values["yarn_correction_range_round_to_int"] = bool(given.get("truncate", True))
    return values | scales, problems


def _longrope_from_hf(
    key: str, given: Mapping[str, Any], max_position_embeddings: int
) -> tuple[dict[str, Any], list[Problem]]:
    values: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = given.get(name)
        if not isinstance(factors, list) or not factors or not all(map(is_factor, factors)):
            rule = "is not a list of positive numbers, one for each rotary pair"
            return {}, [Problem(f"{key}.{name}", f"{factors!r:.40}", rule, OWN_FOLDER_FIX)]
        values[f"longrope_{name}"] = format_longrope_factors(factors)
    original = given.get(_ORIGINAL) or max_position_embeddings
    if not is_count(original, 2):
        return {}, [Problem(_ORIGINAL, f"{original!r:.40}", "is not a length of a context", OWN_FOLDER_FIX)]
    factor = given.get("factor") or max(max_position_embeddings / original, 1.0)
    values |= {"rope_scaling_factor": float(factor), "original_max_position_embeddings": original}
    attention = given.get("attention_factor")
    return values | ({} if attention is None else {"longrope_attention_factor": float(attention)}), []


def latent_yarn_problems(family: Family, hf_config: Mapping[str, Any]) -> list[Problem]:
    """Returns YaRN settings by which latent attention scales its scores in another way than by the two mscales together."""
    key, given = _rope_table(family, hf_config)
    scale, all_dim, factor = (given.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor"))
    if not all_dim or (scale and factor is None):
        return []
    rule = "scales scores of latent attention, and the decoder does so only where mscale is given and attention_factor is not"
    return [Problem(f"{key}.mscale_all_dim", str(all_dim), rule, "Give mscale, or remove both.")]


def _unsupported_rope(family: Family, key: str, rope_parameters: Mapping[str, Any]) -> list[Problem]:
    kind = _rope_type(rope_parameters)
    if any(isinstance(value, Mapping) for value in rope_parameters.values()):
        rule = f"differs between layers, and those of a {family.name} model have one rotation"
        return [Problem(key, "", rule, "Use another model.")]
    if kind not in family.rope_types:
        known = ", ".join(dict.fromkeys(family.rope_types.values()))
        rule = f"is a rotary scaling that a {family.name} model does not have here"
        return [Problem(f"{key}.rope_type", f'"{kind}"', rule, f"It has {known}.")]
    return []


def _yarn_mscale_from_hf(
    key: str, rope_parameters: Mapping[str, Any], factor: float
) -> tuple[dict[str, Any], list[Problem]]:
    given, scale, all_dim = (rope_parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None and factor > 1.0:
        return {"yarn_mscale": (float(given) - 1.0) / (0.1 * math.log(factor)), "yarn_mscale_all_dim": 0.0}, []
    if given is not None and given != 1.0:
        rule = "changes attention although factor 1 stretches nothing"
        return {}, [Problem(f"{key}.attention_factor", str(given), rule, "Remove it, or give a factor above 1.")]
    if scale and all_dim:
        return {"yarn_mscale": float(scale), "yarn_mscale_all_dim": float(all_dim)}, []
    return {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}, []


def _own_rope_type(model: ModelConfig) -> tuple[str, str]:
    """Returns the kind of a model's scaling, and the setting that says so."""
    for name, kind in (
        ("use_rope_scaling", "llama3"),
        ("rotary_seq_len_interpolation_factor", "linear"),
        ("longrope_short_factor", "longrope"),
    ):
        if model.position_embedding_type != "yarn" and getattr(model, name):
            return kind, name
    return ("yarn" if model.position_embedding_type == "yarn" else "default"), "position_embedding_type"


def unsupported_rope_type(family: Family, model: ModelConfig) -> list[Problem]:
    """Returns the setting of a rotary scaling that transformers does not have for the family."""
    kind, name = _own_rope_type(model)
    if not family.has_rope or kind in family.rope_types.values():
        return []
    return [unsupported_setting(name, getattr(model, name), family, f"no {kind} scaling")]


def rope_to_hf_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Returns the rope keys of config.json; in both spellings, for readers of either age."""
    parameters: dict[str, Any] = {"rope_type": "default"}
    if model.position_embedding_type == "yarn":
        parameters = {"rope_type": "yarn", "beta_fast": model.yarn_beta_fast, "beta_slow": model.yarn_beta_slow}
        parameters |= _yarn_mscale_to_hf(model)
        parameters |= {} if model.yarn_correction_range_round_to_int else {"truncate": False}
    elif model.use_rope_scaling:
        parameters = {"rope_type": "llama3", "low_freq_factor": model.rope_low_freq_factor}
        parameters["high_freq_factor"] = model.rope_high_freq_factor
    elif model.rotary_seq_len_interpolation_factor is not None:
        parameters = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    elif model.longrope_short_factor is not None and model.longrope_long_factor is not None:
        parameters = {"rope_type": "longrope"}
        parameters["short_factor"] = list(parse_longrope_factors(model.longrope_short_factor))
        parameters["long_factor"] = list(parse_longrope_factors(model.longrope_long_factor))
        if model.longrope_attention_factor is not None:
            parameters["attention_factor"] = model.longrope_attention_factor
    scaling = None
    if parameters["rope_type"] in ("yarn", "llama3", "longrope"):
        parameters["factor"] = model.rope_scaling_factor
        parameters["original_max_position_embeddings"] = model.original_max_position_embeddings
    if parameters["rope_type"] != "default":
        scaling = dict(parameters)
    partial = {_PARTIAL: model.rotary_percent} if _PARTIAL in family.defaults else {}
    whole: dict[str, Any] = {**parameters, **partial, "rope_theta": model.rotary_base}
    legacy = {"rope_theta": model.rotary_base, "rope_scaling": scaling, **partial}
    if parameters["rope_type"] == "longrope":
        legacy[_ORIGINAL] = model.original_max_position_embeddings
    if not family.rope_by_layer_type:
        return {"rope_parameters": whole, **legacy}
    local = model.rotary_base if model.rotary_base_local is None else model.rotary_base_local
    by_type = {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": by_type, "rope_local_base_freq": local, **legacy}


def _yarn_mscale_to_hf(model: ModelConfig) -> dict[str, float]:
    if model.yarn_mscale and model.yarn_mscale_all_dim:
        return {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    if model.yarn_mscale == 1.0 and not model.yarn_mscale_all_dim:
        return {}
    factors = {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    return {"attention_factor": yarn_attention_scaling(model.rope_scaling_factor, **factors)}
