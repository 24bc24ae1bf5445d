"""The config.json of a model folder: that of the Hugging Face family, or our own where no family can express the model.

Ours has the `model_type` "petatron" and holds the values of `ModelConfig` and `MoEConfig` under "model" and "moe", defaults
included, so that a later default changes no saved model. Choices of a run, such as the length of its samples or how its experts
are computed, are no part of the model and not among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.model_identity import model_settings
from petatron.models.hf.config_json import from_hf_config, matching_family, to_hf_config
from petatron.models.hf.family import OWN_MODEL_TYPE
from petatron.models.hf.moe_config_json import format_moe_layer_freq
from petatron.models.model_spec import ModelSpec

_OWN_ARCHITECTURE = "PetatronForCausalLM"
_FIX = "Take config.json from the folder as it was saved, or use a newer Petatron."


def build_config_json(spec: ModelSpec, dtype: torch.dtype | str) -> dict[str, Any]:
    """Returns the content of config.json for a folder of `folder_entries` with tensors of a dtype.

    >>> from petatron.models.registry import spec_from_config
    >>> without_positions = ModelConfig(num_attention_heads=1, position_embedding_type="none")
    >>> build_config_json(spec_from_config(without_positions), "bfloat16")["model_type"]
    'petatron'
    """
    return (
        to_hf_config(spec) | _stored_dtype(dtype) if matching_family(spec) is not None else own_config_json(spec, dtype)
    )


def own_config_json(spec: ModelSpec, dtype: torch.dtype | str) -> dict[str, Any]:
    """Returns the content of our own config.json, also for a model that a family can express."""
    content = {"model_type": OWN_MODEL_TYPE, "architectures": [_OWN_ARCHITECTURE], **_stored_dtype(dtype)}
    content["model"] = _model_settings(asdict(spec.config))
    if spec.moe is not None:
        content["moe"] = _model_settings(asdict(spec.moe)) | {"moe_layer_freq": format_moe_layer_freq(spec)}
    return content


def _stored_dtype(dtype: torch.dtype | str) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}  # the second is the key of readers older than transformers 5


def parse_config_json(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ModelConfig and MoEConfig values from a config.json of either kind; the second are empty for a dense model."""
    if content.get("model_type") != OWN_MODEL_TYPE:
        return from_hf_config(content)
    problems = [
        *_own_problems("model", content.get("model"), {field.name for field in fields(ModelConfig)}),
        *_own_problems("moe", content.get("moe", {}), {field.name for field in fields(MoEConfig)}),
    ]
    if problems:
        raise ConfigError(problems)
    return _with_tuples(content["model"]), _with_tuples(content.get("moe", {}))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as the schema has them: JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _own_problems(section: str, values: Any, known: Collection[str]) -> list[Problem]:
    if not isinstance(values, Mapping):
        return [Problem(section, "", "is missing, and a petatron config.json needs it as a table of settings", _FIX)]
    return [
        Problem(f"{section}.{name}", str(values[name]), "is not a setting this version has", _FIX)
        for name in values
        if name not in known or model_settings()[name].role == "runtime"
    ]


def _model_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without those that a run chooses, as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if model_settings()[name].role != "runtime"
    }
