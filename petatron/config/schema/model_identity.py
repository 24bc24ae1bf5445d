"""The identity of a model: the settings that define the function of its weights, as opposed to a run's choices.

A checkpoint, a config.json and a resumed run must agree on the first; the others may differ. Of the first, a model does not use all:
where every layer has experts there is no MLP, and without rotary positions no rotary base. Settings are compared by what is used.
Roles, conditions and forms to compare are those of the schema (`setting_metadata.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from petatron.config.schema.fields import FieldInfo, FieldValue, fields_by_name, unflatten_config
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.setting_metadata import ComparedAs

MODEL_SECTIONS = ("model", "moe")
_TYPES = {"int": int, "float": int | float, "bool": bool, "str": str, "choice": str}


@cache
def model_settings() -> dict[str, FieldInfo]:
    """Returns the settings of a model and its experts by name."""
    return {name: info for name, info in fields_by_name().items() if info.section in MODEL_SECTIONS}


@cache
def variant_defaults() -> dict[str, Any]:
    """Returns the default of every setting by which a model's layers may depart from the plain ones."""
    settings = model_settings().items()
    return {
        name: info.default
        for name, info in settings
        if info.is_variant and info.section == "model" and info.role == "identity"
    }


def is_identity_field(name: str) -> bool:
    """Whether models that differ in this setting are different models.

    >>> is_identity_field("rotary_base"), is_identity_field("hidden_dropout")
    (True, False)
    """
    return name not in model_settings() or model_settings()[name].role in ("identity", "redundant")


def model_identity(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """Returns the settings that define the function of a model's weights, as stored in a checkpoint.

    A decoder has no type, and a model has no settings of a feature that it does not use, nor of a variant that it does not have, so
    that checkpoints from before there were others still match.
    """
    run = RawRunConfig(model=model, moe=moe or MoEConfig())
    settings = asdict(run.model) | asdict(run.moe)
    absent = {info.name for info in model_settings().values() if _is_absent(info, settings, run)}
    return {name: value for name, value in settings.items() if is_identity_field(name) and name not in absent}


def _is_absent(info: FieldInfo, settings: Mapping[str, Any], run: RawRunConfig) -> bool:
    """Whether a model is stored without a setting: it departs from nothing, or belongs to a feature that a decoder does not use."""
    default = {**settings, info.name: info.default}
    is_default = _compared_form(info.name, settings) == _compared_form(info.name, default)
    optional, selects = not info.feature.always_stored, "selects" in info.marks
    if is_default and (_had_default_before(info) or (selects and optional)):
        return True
    is_unused = optional and not selects and info.feature.unused_reason(run) is not None
    return is_unused and (is_default or run.model.model_type == "decoder")


def _had_default_before(info: FieldInfo) -> bool:
    """Whether models that were stored without a setting had its default."""
    return info.is_variant or "later" in info.marks


def identity_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Returns the settings by which two models differ, by name, of those that both say and that the second one uses.

    `ours` are the settings of a model or more than these, by field name; JSON's lists count as tuples. Variants that one does not
    say have their default.

    >>> mixtral = dict(num_layers=2, num_experts=4, moe_layer_freq="1", ffn_hidden_size=48, moe_ffn_hidden_size=48)
    >>> identity_differences(mixtral, mixtral | dict(ffn_hidden_size=128, moe_layer_freq="[1, 1]", num_layers=3))
    ['num_layers']
    """
    run = _config_of(ours)
    optional = {name: info.default for name, info in model_settings().items() if _had_default_before(info)}
    theirs, ours = ({**optional, **settings} for settings in (theirs, ours))
    return [
        name
        for name in sorted(theirs.keys() & ours.keys())
        if _is_compared(name, run) and _compared_form(name, theirs) != _compared_form(name, ours)
    ]


def _is_compared(name: str, run: RawRunConfig) -> bool:
    """Whether a model uses a setting of its identity. A setting that this version does not know counts; what another kind of model than
    the decoder uses is its own affair."""
    info = model_settings().get(name)
    if info is None:
        return True
    return info.role == "identity" and (run.model.model_type != "decoder" or info.unused_reason(run) is None)


def _compared_form(name: str, settings: Mapping[str, Any]) -> Any:
    value, info = settings[name], model_settings().get(name)
    for note in () if info is None else info.notes_of(ComparedAs):
        value = note.normal_form(value, settings)
    return tuple(value) if isinstance(value, list) else value


def _config_of(settings: Mapping[str, Any]) -> RawRunConfig:
    """Returns a config with the settings of a model; what is missing, or of another type, has its default."""
    values: dict[str, FieldValue] = {}
    for name, info in model_settings().items():
        value, is_number = settings.get(name), info.kind in ("int", "float")
        if isinstance(value, _TYPES[info.kind]) and not (is_number and isinstance(value, bool)) and not info.is_list:
            values[info.path] = value
    return unflatten_config(values)
