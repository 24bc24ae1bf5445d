"""Reads the settings of a model from the config.json of a Hugging Face model, and writes that of the first family that can express a model.

Each family does both by one function (`config_translation.py`). Whatever the decoder or the family cannot express is a problem, and all
problems are raised at once. A setting of training alone that a family has no key for, such as dropout in Llama, is not written.

A model that no family can express has a config.json of our own: its `model_type` is "petatron", and it holds the values of `ModelConfig`
and `MoEConfig` under "model" and "moe", defaults included, so that a later default changes no saved model. Choices of a run, such as the
length of its samples or how its experts are computed, are no part of the model and not among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.config.schema.fields import flag_name
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.model_identity import model_settings
from petatron.models.hf.config_translation import ConfigReader, ConfigWriter
from petatron.models.hf.family import OWN_MODEL_TYPE, Family
from petatron.models.hf.find_family import FAMILIES, family_name_of_config, fp8_block_size, has_mxfp4_weights
from petatron.models.hf.moe_config_json import format_moe_layer_freq
from petatron.models.hf.task_head_config_json import read_task_head, task_head_keys, task_head_problem
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import without_task_head


def from_hf_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns ModelConfig and MoEConfig values from the content of a config.json; the second are empty for a dense model.

    The sequence length and the load-balancing loss are choices of the run and not among them.

    >>> values, _ = from_hf_config({"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50})
    >>> values["num_layers"], values["ffn_hidden_size"], values["activation"]
    (2, 32, 'gelu_tanh')
    """
    family = FAMILIES[family_name_of_config(config)]
    reader, values = _read(family, config)
    head, wrong_head = read_task_head(family, config)
    values |= head
    problems = reader.problems + wrong_head + _quantization_problems(config)
    if reader.wrong:
        others = _read(family, config, stand_in=1)[0].problems + wrong_head + _quantization_problems(config)
        # The problems that remain whichever value of its type a wrong key has.
        remaining = [problem for problem in problems if problem in others and problem.where not in reader.wrong]
        raise ConfigError([*reader.wrong.values(), *remaining])
    raise_problems(problems)
    experts = {name: value for name, value in values.items() if model_settings()[name].section == "moe"}
    return {name: value for name, value in values.items() if name not in experts}, experts


def _read(family: Family, config: Mapping[str, Any], *, stand_in: int = 0) -> tuple[ConfigReader, dict[str, Any]]:
    reader = ConfigReader(family.name, config, stand_in=stand_in)
    family.translate(reader)
    other_type = {} if family.model_type == "decoder" else {"model_type": family.model_type}
    return reader, {"window_size": None, **other_type, **reader.values()}


def _quantization_problems(config: Mapping[str, Any]) -> list[Problem]:
    readable = fp8_block_size(config) is not None or has_mxfp4_weights(config)
    if not config.get("quantization_config") or readable:
        return []
    rule = "says that the weights are quantized, and only plain ones, FP8 by blocks and MXFP4 can be read"
    return [Problem("quantization_config", "", rule, "Use the model's unquantized weights.")]


def matching_family(spec: ModelSpec) -> Family | None:
    """Returns the family whose names and config.json express the model, if one does."""
    family, writer = _closest_family(spec)
    return None if writer.problems else family


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """Returns the content of a model's config.json; token ids are None, the tokenizer's owner fills them in.

    Raises `ConfigError` with the reasons if no family can express the model.

    >>> from petatron.validate import load_config
    >>> from petatron.models.registry import model_spec
    >>> run = load_config(["--vocab-size", "256"], preset="tiny-llama", require_training=False).config
    >>> to_hf_config(model_spec(run))["architectures"]
    ['LlamaForCausalLM']
    """
    family, writer = _closest_family(spec)
    if writer.problems:
        raise ConfigError(writer.problems)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    content = {"model_type": family.name, "architectures": [family.architecture], **ids, **writer.keys()}
    return content | task_head_keys(family, spec)


def _closest_family(spec: ModelSpec) -> tuple[Family, ConfigWriter]:
    """Returns the first family that can express a model, or else the closest one, with what it has no key for."""
    closest: list[tuple[int, Family, ConfigWriter]] = []
    layers = spec if spec.config.pooling is None else without_task_head(spec)
    alike = [family for family in FAMILIES.values() if family.model_type == spec.config.model_type]
    for family in alike or FAMILIES.values():
        if bool(family.branches) != (spec.config.hybrid_layer_pattern is not None):
            continue
        writer = ConfigWriter(family.name, layers, model_type=family.model_type)
        family.translate(writer)
        writer.finish()
        if (problem := task_head_problem(family, spec)) is not None:
            writer.problems.append(problem)
        if spec.config.adapter is not None:
            rule, fix = (
                "is beside the weights, and a Hugging Face model has no place for it",
                "Merge it (docs/adapters.md).",
            )
            writer.problems.append(Problem("--adapter", spec.config.adapter, rule, fix))
        if not writer.problems:
            return family, writer
        closest.append((len(writer.problems) + 10 * _structural_differences(spec, writer), family, writer))
    return min(closest, key=lambda candidate: candidate[0])[1:]


def _structural_differences(spec: ModelSpec, writer: ConfigWriter) -> int:
    """Counts differences by which a family is another kind of model, however few settings say so."""
    if spec.config.hybrid_layer_pattern is not None:  # whatever their positions and experts are
        return any(problem.where == flag_name("hybrid_layer_pattern") for problem in writer.problems)
    rotary = spec.config.position_embedding_type not in ("learned_absolute", "alibi")
    latent = writer.fixed.get("multi_latent_attention", False) != spec.config.multi_latent_attention
    depths = spec.config.mtp_num_layers is not None and "mtp_num_layers" not in writer.names
    linear = writer.fixed.get("experimental_attention_variant") != spec.config.experimental_attention_variant
    experts = ("num_experts" in writer.names) != (spec.moe is not None)
    return (("rotary_base" in writer.names) != rotary) + experts + latent + depths + 2 * linear


_OWN_ARCHITECTURE = "PetatronForCausalLM"
_FIX = "Take config.json from the folder as it was saved, or use a newer Petatron."


def build_config_json(spec: ModelSpec, dtype: torch.dtype | str) -> dict[str, Any]:
    """Returns the content of config.json for a folder of `folder_entries` with tensors of a dtype.

    >>> from petatron.models.registry import spec_from_config
    >>> without_positions = ModelConfig(num_attention_heads=1, position_embedding_type="none")
    >>> build_config_json(spec_from_config(without_positions), "bfloat16")["model_type"]
    'petatron'
    """
    if matching_family(spec) is None:
        return own_config_json(spec, dtype)
    return to_hf_config(spec) | _stored_dtype(dtype)


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
    raise_problems(problems)
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
