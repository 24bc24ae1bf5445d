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
from petatron.config.schema.model import ModelConfig
from petatron.layers.rope import yarn_attention_scaling

_DEFAULT_THETA = 10000.0


def rope_from_hf_config(
    hf_config: Mapping[str, Any], max_position_embeddings: int
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns ModelConfig values, and what the decoder cannot express."""
    key = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    given: Mapping[str, Any] = hf_config.get(key) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", hf_config.get("rope_theta", _DEFAULT_THETA))
    values: dict[str, Any] = {"rotary_base": float(theta), "position_embedding_type": "rope"}
    problems = _unsupported_rope(key, given, hf_config)
    if problems:
        return {}, problems
    if kind == "default":
        return values, []
    original = given.get("original_max_position_embeddings") or max_position_embeddings
    factor = given.get("factor") or (max_position_embeddings / original if kind == "yarn" else None)
    if factor is None or (kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= given.keys()):
        rule = "lacks one of factor, low_freq_factor, high_freq_factor"
        return {}, [Problem(key, f'of type "{kind}"', rule, "Take config.json from the model's own folder.")]
    values |= {"rope_scaling_factor": float(factor), "original_max_position_embeddings": int(original)}
    if kind == "llama3":
        values["use_rope_scaling"] = True
        values |= {f"rope_{name}": float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}
        return values, []
    scales, problems = _yarn_mscale_from_hf(key, given, float(factor))
    values["position_embedding_type"] = "yarn"
    values["yarn_beta_fast"] = float(given.get("beta_fast") or 32)
    values["yarn_beta_slow"] = float(given.get("beta_slow") or 1)
    return values | scales, problems


def latent_yarn_problems(hf_config: Mapping[str, Any]) -> list[Problem]:
    """Returns YaRN settings by which latent attention scales its scores in another way than by the two mscales together."""
    key = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    given: Mapping[str, Any] = hf_config.get(key) or {}
    scale, all_dim, factor = (given.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor"))
    if not all_dim or (scale and factor is None):
        return []
    rule = "scales scores of latent attention, and the decoder does so only where mscale is given and attention_factor is not"
    return [Problem(f"{key}.mscale_all_dim", str(all_dim), rule, "Give mscale, or remove both.")]


def _unsupported_rope(key: str, rope_parameters: Mapping[str, Any], hf_config: Mapping[str, Any]) -> list[Problem]:
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    partial = rope_parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    if any(isinstance(value, Mapping) for value in rope_parameters.values()):
        return [Problem(key, "", "differs between layers, and the decoder has one rotation", "Use another model.")]
    if kind not in ("default", "llama3", "yarn"):
        rule = "is a rotary scaling the decoder does not have"
        return [Problem(f"{key}.rope_type", f'"{kind}"', rule, "It has default, llama3 and yarn.")]
    if partial not in (None, 1, 1.0):
        rule = "rotates a part of each head, which these families do not do"
        return [Problem("partial_rotary_factor", str(partial), rule, "Remove it, or use 1.0.")]
    if kind == "yarn" and rope_parameters.get("truncate", True) is False:
        rule = "keeps the bounds of the ramp fractional, and the decoder rounds them"
        return [Problem(f"{key}.truncate", "false", rule, "Use another model.")]
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


def rope_to_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the rope keys of config.json; in both spellings, for readers of either age."""
    parameters: dict[str, Any] = {"rope_type": "default"}
    if model.position_embedding_type == "yarn":
        parameters = {"rope_type": "yarn", "beta_fast": model.yarn_beta_fast, "beta_slow": model.yarn_beta_slow}
        parameters |= _yarn_mscale_to_hf(model)
    elif model.use_rope_scaling:
        parameters = {"rope_type": "llama3", "low_freq_factor": model.rope_low_freq_factor}
        parameters["high_freq_factor"] = model.rope_high_freq_factor
    scaling = None
    if parameters["rope_type"] != "default":
        parameters["factor"] = model.rope_scaling_factor
        parameters["original_max_position_embeddings"] = model.original_max_position_embeddings
        scaling = dict(parameters)
    return {
        "rope_parameters": {**parameters, "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
    }


def _yarn_mscale_to_hf(model: ModelConfig) -> dict[str, float]:
    if model.yarn_mscale and model.yarn_mscale_all_dim:
        return {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    if model.yarn_mscale == 1.0 and not model.yarn_mscale_all_dim:
        return {}
    factors = {"mscale": model.yarn_mscale, "mscale_all_dim": model.yarn_mscale_all_dim}
    return {"attention_factor": yarn_attention_scaling(model.rope_scaling_factor, **factors)}
