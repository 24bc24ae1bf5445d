"""Translates the rope settings of config.json, in the spelling of transformers 5 (`rope_parameters`) and that before (`rope_theta` and
`rope_scaling`).

YaRN's temperature has two spellings there: `mscale` and `mscale_all_dim`, which count only together, or the number itself,
`attention_factor`. Ours is (0.1 mscale ln f + 1) / (0.1 mscale_all_dim ln f + 1), which covers both: a given temperature t is
mscale = (t - 1) / (0.1 ln f).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.model import ModelConfig
from petatron.config.schema.sections.rope import format_longrope_factors, is_factor, parse_longrope_factors
from petatron.layers.rope import yarn_attention_scaling
from petatron.models.hf.config_json_types import OWN_FOLDER_FIX
from petatron.models.hf.config_translation import Keys, Settings, Translation
from petatron.models.hf.window_config_json import FULL, SLIDING

_DEFAULT_THETA = 10000.0
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_CONTEXT_TYPES = ("llama3", "yarn", "longrope")
"""Kinds of scaling that begin at the context of pretraining."""
ROPE_TYPES: Mapping[str, str] = {
    **{name: name for name in ("default", "linear", "llama3", "yarn", "longrope")},
    "su": "longrope",  # its name in older files of Phi-3
}
_SCALING_KEYS = {
    "rope_scaling_factor": "factor",
    "rotary_seq_len_interpolation_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "longrope_short_factor": "short_factor",
    "longrope_long_factor": "long_factor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyRope:
    """How a family has rotary positions.

    defaults: of `rope_theta`, `rope_parameters`, `partial_rotary_factor` and others; a part of each head is rotated only where the last is
    one of them. only_part: the only part that transformers has. types: the kinds of rotary scaling that transformers has for the family,
    by their names in files. by_layer_type: whether layers with a window have rope settings of their own.
    """

    family: str
    defaults: Keys
    only_part: float | None
    types: Mapping[str, str]
    by_layer_type: bool


def rope(
    config: Translation,
    *,
    types: Mapping[str, str] = ROPE_TYPES,
    by_layer_type: bool = False,
    only_part: float | None = None,
    optional: bool = False,
    **defaults: Any,
) -> None:
    """Translates rotary positions, as `_FamilyRope` says; optional: models may have none."""
    if only_part is not None:
        defaults[_PARTIAL] = only_part
    family = _FamilyRope(
        family=config.family, defaults=defaults, only_part=only_part, types=types, by_layer_type=by_layer_type
    )
    config.always(rotary_percent=1.0)
    positions = "position_embedding_type"
    names = [positions, "rotary_base", "longrope_attention_factor", *_SCALING_KEYS]
    names += ["rotary_percent"] * (_PARTIAL in defaults) + ["rotary_base_local"] * by_layer_type
    config.convert(
        names, lambda keys: _read(config, family, keys), lambda spec: _write(family, spec.config), **defaults
    )
    if not optional:
        config.expect(positions, "only rotary", lambda spec: spec.config.position_embedding_type in ("rope", "yarn"))
    if only_part is not None:
        config.expect("rotary_percent", f"only {only_part}", lambda spec: spec.config.rotary_percent == only_part)
    for kind, setting in _SETTING_OF_TYPE.items():
        if kind not in types.values():
            config.expect(setting, f"no {kind} scaling", lambda spec, kind=kind: _own_rope_type(spec.config) != kind)
    config.expect("yarn_mscale", "both mscales or neither", lambda spec: not _scales_scores_alone(spec.config))


def rope_keys(keys: Keys) -> dict[str, str]:
    """Returns the key of each rope setting in a config.json."""
    table = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    scaling = {setting: f"{table}.{key}" for setting, key in _SCALING_KEYS.items()}
    return {"rotary_percent": _PARTIAL, "rotary_base": "rope_theta", **scaling}


def _scales_scores_alone(model: ModelConfig) -> bool:
    scores_alone = model.yarn_mscale_all_dim and not model.yarn_mscale
    return bool(model.multi_latent_attention and model.position_embedding_type == "yarn" and scores_alone)


def _read(config: Translation, family: _FamilyRope, hf_config: Keys) -> tuple[Settings, list[Problem]]:
    key, given = _rope_table(family, hf_config)
    local: Settings = {}
    if family.by_layer_type:
        given, local, problems = _split_by_layer_type(family, hf_config)
        if problems:
            return {}, problems
    kind = family.types.get(_rope_type(given))
    theta = given.get("rope_theta", hf_config.get("rope_theta", _DEFAULT_THETA))
    part = given.get(_PARTIAL, hf_config.get(_PARTIAL))
    problems = _unsupported_rope(family, key, given)
    if theta is None:
        problems.append(Problem("rope_theta", "None", "is not a number", OWN_FOLDER_FIX))
    problems += _part_problems(family, part, hf_config.get(_PARTIAL))
    problems += _latent_yarn_problems(key, given) if config.setting("multi_latent_attention") else []
    if problems or theta is None:
        return {}, problems
    values: dict[str, Any] = {"rotary_base": float(theta), "position_embedding_type": "rope"}
    values |= {"rotary_percent": float(part or 0.0)} if _PARTIAL in family.defaults else {}
    if local and config.setting("window_size") is not None and (kind != "default" or local["rope_theta"] != theta):
        values["rotary_base_local"] = float(local["rope_theta"])
    if kind == "default":
        return values, []
    if kind in _CONTEXT_TYPES and hf_config.get(_ORIGINAL) is not None and not local:
        given = {**given, _ORIGINAL: hf_config[_ORIGINAL]}  # the key of the model itself counts more
    longest = config.setting("max_position_embeddings")
    if kind == "longrope":
        scaling, problems = _longrope_from_hf(key, given, longest)
    else:
        scaling, problems = _scaling_from_hf(key, str(kind), given, longest)
    return values | scaling, problems


def _part_problems(family: _FamilyRope, part: object, model_part: object) -> list[Problem]:
    """Returns what is wrong with the part of each head that is rotated, by the table or by the model's own key."""
    if _PARTIAL not in family.defaults and part not in (None, 1, 1.0):
        rule = "rotates a part of each head, which this family does not do"
        return [Problem(_PARTIAL, str(part), rule, "Remove it, or use 1.0.")]
    if _PARTIAL in family.defaults and part is None:
        return [Problem(_PARTIAL, "None", "is not a number", OWN_FOLDER_FIX)]
    only = family.only_part
    wrong = [value for value in (part, model_part) if only is not None and value != only]
    rule = f"is not {only}, the only value that transformers has for a {family.family} model"
    return [Problem(_PARTIAL, str(value), rule, "Use another model.") for value in wrong[:1]]


def _rope_table(family: _FamilyRope, hf_config: Keys) -> tuple[str, Mapping[str, Any]]:
    """Returns the table of rope settings and its key; of two tables `rope_scaling` counts, as in transformers.

    Model cards tell their readers to add `rope_scaling` to a config.json for longer contexts, whichever spelling that has.
    """
    if hf_config.get("rope_scaling"):
        return "rope_scaling", hf_config["rope_scaling"]
    return "rope_parameters", hf_config.get("rope_parameters") or family.defaults.get("rope_parameters") or {}


def _rope_type(table: Mapping[str, Any]) -> str:
    return str(table.get("rope_type", table.get("type", "default")))


def _split_by_layer_type(family: _FamilyRope, hf_config: Keys) -> tuple[Settings, Settings, list[Problem]]:
    """Returns the settings of layers without and with a window; the second are not scaled."""
    given = hf_config.get("rope_parameters") or {}
    tables = {name: table for name, table in given.items() if isinstance(table, Mapping | None)}
    scaling = hf_config.get("rope_scaling") or {}
    full = {**(tables.get(FULL) or {}), **scaling}
    local = dict(tables.get(SLIDING) or {})
    theta, usual = hf_config.get("rope_theta", _DEFAULT_THETA), family.defaults.get("rope_theta")
    problems: list[Problem] = []
    if scaling and "rope_type" not in scaling:
        rule = f"counts in transformers 4, and not in 5, which reads rope_type alone in a {family.family} model"
        problems.append(Problem("rope_scaling.type", f"{scaling.get('type')!r:.40}", rule, "Write rope_type instead."))
    if "rope_theta" not in local and "rope_local_base_freq" not in family.defaults and theta != usual:
        rule = f"is that of all layers in transformers 4, and of {FULL} alone in 5, where {SLIDING} has {usual}"
        problems.append(Problem("rope_theta", str(theta), rule, f"Say rope_parameters.{SLIDING}.rope_theta."))
    local.setdefault("rope_theta", hf_config.get("rope_local_base_freq", theta))
    if set(given) - {FULL, SLIDING} or set(given) - set(tables):
        rule = f"is not a table of {FULL} and one of {SLIDING}, which a {family.family} model has"
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


def _scaling_from_hf(key: str, kind: str, given: Keys, max_position_embeddings: int) -> tuple[Settings, list[Problem]]:
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


def _longrope_from_hf(key: str, given: Keys, max_position_embeddings: int) -> tuple[Settings, list[Problem]]:
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


def _latent_yarn_problems(key: str, given: Keys) -> list[Problem]:
    """Returns YaRN settings by which latent attention scales its scores in another way than by the two mscales together."""
    scale, all_dim, factor = (given.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor"))
    if not all_dim or (scale and factor is None):
        return []
    rule = "scales scores of latent attention, and the decoder does so only where mscale is given and attention_factor is not"
    return [Problem(f"{key}.mscale_all_dim", str(all_dim), rule, "Give mscale, or remove both.")]


def _unsupported_rope(family: _FamilyRope, key: str, rope_parameters: Mapping[str, Any]) -> list[Problem]:
    kind = _rope_type(rope_parameters)
    if any(isinstance(value, Mapping) for value in rope_parameters.values()):
        rule = f"differs between layers, and those of a {family.family} model have one rotation"
        return [Problem(key, "", rule, "Use another model.")]
    if kind not in family.types:
        known = ", ".join(dict.fromkeys(family.types.values()))
        rule = f"is a rotary scaling that a {family.family} model does not have here"
        return [Problem(f"{key}.rope_type", f'"{kind}"', rule, f"It has {known}.")]
    return []


def _yarn_mscale_from_hf(key: str, rope_parameters: Mapping[str, Any], factor: float) -> tuple[Settings, list[Problem]]:
    given, scale, all_dim = (rope_parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None and factor > 1.0:
        return {"yarn_mscale": (float(given) - 1.0) / (0.1 * math.log(factor)), "yarn_mscale_all_dim": 0.0}, []
    if given is not None and given != 1.0:
        rule = "changes attention although factor 1 stretches nothing"
        return {}, [Problem(f"{key}.attention_factor", str(given), rule, "Remove it, or give a factor above 1.")]
    if scale and all_dim:
        return {"yarn_mscale": float(scale), "yarn_mscale_all_dim": float(all_dim)}, []
    return {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}, []


_SETTING_OF_TYPE = {
    "yarn": "position_embedding_type",
    "llama3": "use_rope_scaling",
    "linear": "rotary_seq_len_interpolation_factor",
    "longrope": "longrope_short_factor",
}


def _own_rope_type(model: ModelConfig) -> str:
    if model.position_embedding_type == "yarn":
        return "yarn"
    return next((kind for kind, name in list(_SETTING_OF_TYPE.items())[1:] if getattr(model, name)), "default")


def _write(family: _FamilyRope, model: ModelConfig) -> Settings:
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
    full: dict[str, Any] = {**parameters, **partial, "rope_theta": model.rotary_base}
    legacy = {"rope_theta": model.rotary_base, "rope_scaling": scaling, **partial}
    if parameters["rope_type"] == "longrope":
        legacy[_ORIGINAL] = model.original_max_position_embeddings
    if not family.by_layer_type:
        return {"rope_parameters": full, **legacy}
    local = model.rotary_base if model.rotary_base_local is None else model.rotary_base_local
    by_type = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": by_type, "rope_local_base_freq": local, **legacy}


def _yarn_mscale_to_hf(model: ModelConfig) -> dict[str, float]:
    if model.yarn_mscale and model.yarn_mscale_all_dim:
        return {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    if model.yarn_mscale == 1.0 and not model.yarn_mscale_all_dim:
        return {}
    factors = {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    return {"attention_factor": yarn_attention_scaling(model.rope_scaling_factor, **factors)}
