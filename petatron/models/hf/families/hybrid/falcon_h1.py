"""Falcon-H1: every layer runs attention and Mamba-2 on the same normed input and adds both, then an MLP; factors are everywhere.

In a pattern each of its layers is `P-`. The norm of a scan's output, where there is one, is over as many groups as B and C have, before
or after the gate. Factors on inputs of projections are here factors on what these make; no projection has a bias. The factor on
logits is the inverse of `logits_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.config.schema.hybrid_pattern import MLP, PARALLEL
from petatron.models.hf.families.hybrid.mamba_tables import (
    BAMBA_DEFAULTS,
    BAMBA_KEYS,
    BAMBA_MAPPINGS,
    BAMBA_SINGLE_VALUES,
    HYBRID_FIXED,
    read_layer_count,
    time_step_problems,
)
from petatron.models.hf.family import OWN_FOLDER_FIX, Family, HybridLayers, ModuleMapping, unsupported_setting
from petatron.models.hf.shared_tables import LLAMA_DEFAULTS, LLAMA_KEYS, SILU_ALONE
from petatron.models.model_spec import ModelSpec

_LAYER = "model.layers.*"
_FACTORS = (
    *("embedding_multiplier", "attention_in_multiplier", "key_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)
_FACTOR_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
_HEAD_FACTOR = "lm_head_multiplier"
_NORMS = {
    (False, False): "none",
    (False, True): "none",
    (True, False): "gate_then_norm",
    (True, True): "norm_then_gate",
}
"""By `mamba_rms_norm` and `mamba_norm_before_gate`."""


def _read_layers(hf_config: Mapping[str, Any]) -> str | Problem:
    count = read_layer_count(hf_config)
    return count if isinstance(count, Problem) else (PARALLEL + MLP) * count


def _write_layers(pattern: str) -> Mapping[str, Any]:
    return {"num_hidden_layers": len(pattern) // 2}


def _is_factor(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # pyright: ignore[reportOperatorIssue]


def _factor_problems(hf_config: Mapping[str, Any]) -> list[Problem]:
    problems = [
        Problem(key, f"{hf_config[key]!r:.40}", "is not a positive number", OWN_FOLDER_FIX)
        for key in (*_FACTORS, _HEAD_FACTOR)
        if not _is_factor(hf_config[key])
    ]
    for key, count in _FACTOR_LISTS.items():
        given = hf_config[key]
        sound = isinstance(given, list | tuple) and len(given) == count and all(map(_is_factor, given))
        if given is not None and not sound:
            problems.append(Problem(key, f"{given!r:.40}", f"is no list of {count} positive numbers", OWN_FOLDER_FIX))
    return problems


def _size_problems(hf_config: Mapping[str, Any]) -> list[Problem]:
    heads, head_dim, width = (hf_config[key] for key in ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"))
    key, times = "mamba_d_ssm", ""
    if width is None:
        expand, hidden_size = hf_config["mamba_expand"], hf_config["hidden_size"]
        key, times = "mamba_expand", f"times hidden_size {hidden_size} "
        width = expand * hidden_size if is_count(expand, 1) else None
    if width == heads * head_dim:
        return []
    rule = f"{times}is not the width of {heads} heads of {head_dim} channels"
    return [Problem(key, f"{hf_config[key]!r:.40}", rule, OWN_FOLDER_FIX)]


def _read_more(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    problems = [*_factor_problems(hf_config), *_size_problems(hf_config), *time_step_problems(hf_config)]
    if problems:
        return {}, problems
    lists = {key: tuple(map(float, hf_config[key] or (1,) * count)) for key, count in _FACTOR_LISTS.items()}
    norm = _NORMS[bool(hf_config["mamba_rms_norm"]), bool(hf_config["mamba_norm_before_gate"])]
    groups = {"mamba_norm_groups": hf_config["mamba_n_groups"], "mamba_gated_norm": norm}
    return {**lists, **groups, "logits_scaling": 1.0 / hf_config[_HEAD_FACTOR]}, []


def _inverse(scaling: float) -> float:
    """Returns the factor of which this is the inverse, as it was written where that had 15 digits.

    >>> _inverse(1.0 / 0.01953125), _inverse(1.0 / 0.3)
    (0.01953125, 0.3)
    """
    short = float(f"{1.0 / scaling:.15g}")
    return short if 1.0 / short == scaling else 1.0 / scaling


def _write_more(spec: ModelSpec) -> Mapping[str, Any]:
    model = spec.config
    norm = next(keys for keys, name in _NORMS.items() if name == model.mamba_gated_norm)
    return {
        **{key: list(getattr(model, key)) for key in _FACTOR_LISTS},
        _HEAD_FACTOR: _inverse(model.logits_scaling),
        "mamba_d_ssm": model.mamba_num_heads * model.mamba_head_dim,
        "mamba_rms_norm": norm[0],
        "mamba_norm_before_gate": norm[1],
    }


def _unsupported(spec: ModelSpec) -> list[Problem]:
    model = spec.config
    if model.mamba_gated_norm == "none" or model.mamba_norm_groups == model.mamba_num_groups:
        return []
    allowed = "a norm over as many groups as B and C have"
    return [unsupported_setting("mamba_norm_groups", model.mamba_norm_groups, FALCON_H1, allowed)]


FALCON_H1 = Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    models="Falcon-H1",
    what_differs="a [hybrid](mamba.md): attention and Mamba-2 in parallel in every layer, with factors on all they take and give",
    prefix="model.",
    mappings=(
        ModuleMapping(("layers.*.attention_norm",), f"{_LAYER}.input_layernorm"),
        *BAMBA_MAPPINGS,
    ),
    ignored_tensors=("*rotary_emb.inv_freq", "*.mup_vector"),
    keys={
        **{ours: key for ours, key in LLAMA_KEYS.items() if ours != "num_layers"},
        **BAMBA_KEYS,
        **{name: name for name in _FACTORS},
    },
    activation_key="hidden_act",
    activations=SILU_ALONE,  # of the convolution too
    defaults={
        **LLAMA_DEFAULTS,
        **BAMBA_DEFAULTS,
        **dict.fromkeys((*_FACTORS, _HEAD_FACTOR), 1.0),
        **dict.fromkeys(_FACTOR_LISTS),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
    },
    fixed=HYBRID_FIXED,
    single_values={**BAMBA_SINGLE_VALUES, "attention_bias": False, "mlp_bias": False, "projectors_bias": False},
    read_more=_read_more,
    write_more=_write_more,
    more_settings=(*_FACTOR_LISTS, "logits_scaling", "mamba_gated_norm"),
    unsupported=_unsupported,
    hybrid=HybridLayers(2, f"({PARALLEL}{MLP})+", _read_layers, _write_layers),
)
