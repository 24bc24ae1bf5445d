"""Megatron's arguments of muP, and the multipliers of a model that follow from them.

A checkpoint has arguments as they were typed: `mup_output_mult` is 1 where Megatron uses 1 / the relative width, and Megatron does not
read `mup_width_mult`. A Megatron without muP (megatron-core up to 0.16.1) has none of these arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.megatron.layer_kind_arguments import has_attention
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.model import ModelConfig, RawModelConfig
from petatron.config.schema.sections.mup import mup_multipliers

MUP_FIELDS = ("use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_embedding_mult", "mup_output_mult",
              "mup_attn_scale_power")  # fmt: skip
_FIX = "Such a checkpoint cannot be converted."


def mup_values(
    arguments: Mapping[str, Any], model: Mapping[str, Any], has_scores: bool, problems: list[Problem]
) -> dict[str, Any]:
    """Returns ModelConfig values of muP and its multipliers (a softmax scale if any layer has attention scores); empty without muP."""
    if not arguments.get("use_mup"):
        return {}
    given = {name: arguments[name] for name in MUP_FIELDS if arguments.get(name) is not None}
    given.setdefault("mup_base_hidden_size", model["hidden_size"])
    wrong = [name for name, value in given.items() if name != "use_mup" and not _is_positive(name, value)]
    problems += [Problem(flag_name(name), f"{given[name]}"[:80], "is no size or factor", _FIX) for name in wrong]
    if wrong or not is_count(model["kv_channels"], 1):
        return {}
    multipliers = mup_multipliers(
        RawModelConfig(**given), model["hidden_size"], model["kv_channels"] if has_scores else None
    )
    return given | {name: value for name, value in asdict(multipliers).items() if value is not None}


def _is_positive(name: str, value: Any) -> bool:
    if fields_by_name()[name].kind == "int":
        return is_count(value, 1)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and (value > 0 or (value == 0 and name == "mup_attn_scale_power"))


def mup_arguments(model: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's arguments of muP; empty for a model that they do not describe."""
    return {name: getattr(model, name) for name in MUP_FIELDS} if model.use_mup and not unlike_mup(model) else {}


def unlike_mup(model: ModelConfig) -> set[str]:
    """Returns the multipliers of a model that are not those of its muP settings, by name."""
    multipliers = expected_multipliers(model)
    return {name for name, value in multipliers.items() if not _same(getattr(model, name), value)}


def expected_multipliers(model: ModelConfig) -> dict[str, Any]:
    """Returns the multipliers that Megatron gives a model, by the names of our settings: those of muP, or none."""
    has_scores = has_attention(model) and not model.multi_latent_attention
    if model.use_mup:
        return asdict(mup_multipliers(model, model.hidden_size, model.kv_channels if has_scores else None))
    return {
        name: fields_by_name()[name].default for name in ("embedding_multiplier", "logits_scaling", "softmax_scale")
    }


def _same(factor: float | None, expected: float | None) -> bool:
    return factor == expected if factor is None or expected is None else math.isclose(factor, expected, rel_tol=1e-12)
