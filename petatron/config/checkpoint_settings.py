"""Settings that come from a checkpoint (`--use-checkpoint-args`): one more source besides presets, files and flags.

This package does not read checkpoints: the caller passes a function that does. Settings that define the function of the weights
(`config/schema/model_identity.py`) always come from the checkpoint, since nothing else could load it, and a notice names what was
overridden. The other settings of the model, and the tokenizer, fill in what nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, fields_by_path
from petatron.config.schema.model_identity import is_identity_field
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.training import CheckpointConfig
from petatron.config.value_origins import ValueOrigin

CHECKPOINT_ARGS_FLAG, MP_ARGS_FLAG = "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"
_MODEL_SECTIONS = ("model", "moe")
_VIRTUAL_STAGES = "parallel.num_virtual_stages_per_pipeline_rank"
_LAYOUT = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.num_layers_per_virtual_pipeline_stage",
    _VIRTUAL_STAGES,
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
    "parallel.pipeline_model_parallel_layout",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
)


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """The settings of a checkpoint's run, by section, as JSON values; without `parallel` it has no layout."""

    source: str
    sections: Mapping[str, Mapping[str, Any]]


ReadCheckpointSettings = Callable[[CheckpointConfig], CheckpointSettings]


@dataclass(frozen=True, slots=True)
class AppliedSettings:
    """The values from a checkpoint, notices of what was overridden, and problems."""

    values: Mapping[str, FieldValue]
    origin: ValueOrigin
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


NO_SETTINGS = AppliedSettings({}, ValueOrigin("checkpoint"))


def apply_checkpoint_settings(
    config: RawRunConfig,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    read: ReadCheckpointSettings | None,
) -> AppliedSettings:
    """Returns what `--use-checkpoint-args` adds to the values of presets, files and flags; nothing without it."""
    checkpoint = config.checkpoint
    if not checkpoint.use_checkpoint_args:
        return NO_SETTINGS
    if checkpoint.load is None:
        return _with_problem("needs --load, the checkpoint to read the model from", "Give it, or leave this out.")
    if read is None:
        return _with_problem(
            "is not known to this command", "Use it with `petatron train`, or describe the model by flags."
        )
    stored = read(checkpoint)
    if checkpoint.use_mp_args_from_checkpoint_args and "parallel" not in stored.sections:
        rule = f"needs the checkpoint of a training run, and {stored.source} says nothing of a layout"
        return AppliedSettings(
            {}, NO_SETTINGS.origin, problems=(Problem(MP_ARGS_FLAG, "", rule, "Give --tp, --pp and --ep instead."),)
        )
    return _apply_settings(stored, checkpoint, values, origins)


def _with_problem(rule: str, fix: str) -> AppliedSettings:
    return AppliedSettings({}, NO_SETTINGS.origin, problems=(Problem(CHECKPOINT_ARGS_FLAG, "", rule, fix),))


def _apply_settings(
    stored: CheckpointSettings,
    checkpoint: CheckpointConfig,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
) -> AppliedSettings:
    found = _all_values(stored)
    problems = tuple(_unknown_settings(stored))
    wins = _identity_paths(found)
    if checkpoint.use_mp_args_from_checkpoint_args:
        wins += _LAYOUT
        if found["parallel.num_layers_per_virtual_pipeline_stage"] or found["parallel.pipeline_model_parallel_layout"]:
            found[_VIRTUAL_STAGES] = None  # it follows from these
    fills = [f"{section}.{name}" for section in _MODEL_SECTIONS for name in stored.sections.get(section, {})]
    tokenizer = [info.path for info in all_fields() if info.section == "tokenizer"]
    if checkpoint.use_tokenizer_model_from_checkpoint_args and not any(origins[path].is_explicit for path in tokenizer):
        fills += [path for path in tokenizer if found[path] is not None]
    taken = {path: found[path] for path in fills if path in found and not origins[path].is_explicit}
    taken |= {path: found[path] for path in wins}
    gave_way = [
        f"{fields_by_path()[path].flag} {values[path]} (now {found[path]})"
        for path in wins
        if origins[path].is_explicit and values[path] != found[path]
    ]
    notices = (f"{CHECKPOINT_ARGS_FLAG}: {stored.source} takes the place of {', '.join(gave_way)}",) if gave_way else ()
    return AppliedSettings(taken, ValueOrigin("checkpoint", stored.source), notices, problems)


def _identity_paths(found: Mapping[str, FieldValue]) -> tuple[str, ...]:
    """Returns the settings that must match the weights. Learned positions are weights, one for each position."""
    paths = [info.path for info in all_fields() if info.section in _MODEL_SECTIONS and is_identity_field(info.name)]
    learned = found["model.position_embedding_type"] == "learned_absolute"
    return (*paths, *["model.max_position_embeddings"] * learned)


def _all_values(stored: CheckpointSettings) -> dict[str, FieldValue]:
    """Returns every field of the checkpoint; a setting added after the checkpoint had its default then."""
    return {
        info.path: _field_value(info, stored.sections.get(info.section, {}).get(info.name, info.default))
        for info in all_fields()
    }


def _field_value(info: FieldInfo, value: Any) -> FieldValue:
    if info.is_list:
        return tuple(value or ())
    return float(value) if info.kind == "float" and isinstance(value, int) else value


def _unknown_settings(stored: CheckpointSettings) -> Iterator[Problem]:
    """Yields settings of a model that this version does not have."""
    fix = "Use the version of Petatron that saved it, or a newer one."
    for section in _MODEL_SECTIONS:
        for name, value in stored.sections.get(section, {}).items():
            info = fields_by_path().get(f"{section}.{name}")
            if info is None:
                yield Problem(
                    CHECKPOINT_ARGS_FLAG,
                    "",
                    f"finds {name} {value} in {stored.source}, which this version does not have",
                    fix,
                )
            elif info.kind == "choice" and not info.is_list and value is not None and value not in info.choices:
                yield Problem(
                    CHECKPOINT_ARGS_FLAG,
                    "",
                    f"finds {info.flag} {value} in {stored.source}, unknown to this version",
                    fix,
                )
