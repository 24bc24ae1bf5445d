"""Settings that come from a checkpoint (`--use-checkpoint-args`): one more source besides presets, files and flags.

This package does not read checkpoints: the caller passes a function that does. Settings that define the function of the weights
(`config/schema/model_identity.py`) always come from the checkpoint, since nothing else could load it, and a notice names what was
overridden. The other settings of the model, and the tokenizer, fill in what nobody chose. `--from` takes settings in the same way
(`from_folder.py`), with stricter rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import Problem
from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, fields_by_path
from petatron.config.schema.model_identity import MODEL_SECTIONS, is_identity_field
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.training import CheckpointConfig
from petatron.config.value_origins import ValueOrigin

CHECKPOINT_ARGS_FLAG, MP_ARGS_FLAG = "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"
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
    imports: tuple[str, ...] = ()
    """The modules of its own that the run imported."""
    has_weights: bool = True


ReadCheckpointSettings = Callable[[CheckpointConfig, str | None], CheckpointSettings]
"""Reads the checkpoint that a run would load, or the model in a folder if one is given."""


@dataclass(frozen=True, slots=True)
class AppliedSettings:
    """The values from a checkpoint, notices of what was overridden, and problems; `doubtful_flags` are flags whose value is unknown."""

    values: Mapping[str, FieldValue]
    origin: ValueOrigin
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    doubtful_flags: frozenset[str] = frozenset()
    imports: tuple[str, ...] = ()
    """The modules of its own that the run imported."""


NO_SETTINGS = AppliedSettings({}, ValueOrigin("checkpoint"))


def apply_checkpoint_settings(
    config: RawRunConfig,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    read: ReadCheckpointSettings | None,
) -> AppliedSettings:
    """Returns what `--use-checkpoint-args` adds to the values of presets, files and flags."""
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        rule, fix = "needs --load, the checkpoint to read the model from", "Give it, or leave this out."
        return unknown_settings(Problem(CHECKPOINT_ARGS_FLAG, "", rule, fix))
    if read is None:
        return unknown_settings(unknown_to_command(CHECKPOINT_ARGS_FLAG))
    stored = read(checkpoint, None)
    if checkpoint.use_mp_args_from_checkpoint_args and "parallel" not in stored.sections:
        rule = f"needs the checkpoint of a training run, and {stored.source} says nothing of a layout"
        return unknown_settings(Problem(MP_ARGS_FLAG, "", rule, "Give --tp, --pp and --ep instead."))
    return _apply_settings(stored, checkpoint, values, origins)


def unknown_settings(*problems: Problem) -> AppliedSettings:
    """The result where nothing could be read: every value is in doubt, so only these problems are reported."""
    flags = frozenset(info.flag for info in all_fields())
    return AppliedSettings({}, NO_SETTINGS.origin, problems=problems, doubtful_flags=flags)


def unknown_to_command(flag: str, found: str = "") -> Problem:
    """The problem of a command that reads no checkpoints."""
    fix = "Use it with `petatron train`, or describe the model by flags."
    return Problem(flag, found, "is not known to this command", fix)


def _apply_settings(
    stored: CheckpointSettings,
    checkpoint: CheckpointConfig,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
) -> AppliedSettings:
    problems = tuple(unsupported_settings(CHECKPOINT_ARGS_FLAG, stored))
    if problems:
        return unknown_settings(*problems)
    found = all_values(stored)
    wins = identity_paths(found)
    if checkpoint.use_mp_args_from_checkpoint_args:
        wins += _LAYOUT
        if found["parallel.num_layers_per_virtual_pipeline_stage"] or found["parallel.pipeline_model_parallel_layout"]:
            found[_VIRTUAL_STAGES] = None  # it follows from these
    taken = unchosen_values(stored, checkpoint, found, origins) | {path: found[path] for path in wins}
    gave_way = [
        f"{fields_by_path()[path].flag} {values[path]} (now {found[path]})"
        for path in wins
        if origins[path].is_explicit and values[path] != found[path]
    ]
    notices = (f"{CHECKPOINT_ARGS_FLAG}: {stored.source} takes the place of {', '.join(gave_way)}",) if gave_way else ()
    return AppliedSettings(taken, ValueOrigin("checkpoint", stored.source), notices, imports=stored.imports)


def unchosen_values(
    stored: CheckpointSettings,
    checkpoint: CheckpointConfig,
    found: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
) -> dict[str, FieldValue]:
    """Returns the checkpoint's settings of model and tokenizer that nobody chose otherwise; a tokenizer is chosen as a whole."""
    fills = [f"{section}.{name}" for section in MODEL_SECTIONS for name in stored.sections.get(section, {})]
    tokenizer = tokenizer_paths()
    if checkpoint.use_tokenizer_model_from_checkpoint_args and not any(origins[path].is_explicit for path in tokenizer):
        fills += [path for path in tokenizer if found[path] is not None]
    return {path: found[path] for path in fills if path in found and not origins[path].is_explicit}


def tokenizer_paths() -> list[str]:
    """Returns the settings that choose a tokenizer."""
    return [info.path for info in all_fields() if info.section == "tokenizer" and info.kind != "bool"]


def identity_paths(found: Mapping[str, FieldValue]) -> tuple[str, ...]:
    """Returns the settings that must match the weights. Learned positions are weights, one for each position."""
    paths = [info.path for info in all_fields() if info.section in MODEL_SECTIONS and is_identity_field(info.name)]
    learned = found["model.position_embedding_type"] == "learned_absolute"
    return (*paths, *["model.max_position_embeddings"] * learned)


def all_values(stored: CheckpointSettings) -> dict[str, FieldValue]:
    """Returns every field of the checkpoint; a setting added after the checkpoint had its default then."""
    return {
        info.path: _field_value(info, stored.sections.get(info.section, {}).get(info.name, info.default))
        for info in all_fields()
    }


def _field_value(info: FieldInfo, value: Any) -> FieldValue:
    if info.is_list:
        return tuple(value or ())
    return float(value) if info.kind == "float" and isinstance(value, int) else value


def unsupported_settings(flag: str, stored: CheckpointSettings) -> Iterator[Problem]:
    """Yields settings of a model that this version does not have."""
    fix = "Use the version of Petatron that saved it, or a newer one."
    for section in MODEL_SECTIONS:
        for name, value in stored.sections.get(section, {}).items():
            info = fields_by_path().get(f"{section}.{name}")
            if info is None:
                rule = f"finds {name} {value} in {stored.source}, which this version does not have"
                yield Problem(flag, "", rule, fix)
            elif info.kind == "choice" and not info.is_list and value is not None and value not in info.choices:
                rule = f"finds {info.flag} {value} in {stored.source}, unknown to this version"
                yield Problem(flag, "", rule, fix)
