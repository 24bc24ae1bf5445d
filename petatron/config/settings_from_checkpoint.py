"""Applies settings from a checkpoint (`--use-checkpoint-args`, `--from`), one more source besides presets, files and flags. This package
does not read checkpoints: the caller passes a function that does.

`--use-checkpoint-args`: settings that define the function of the weights (`config/schema/model_identity.py`) always come from the
checkpoint, since nothing else could load it, and a notice names what was overridden. The other settings of the model, and the tokenizer,
fill in what nobody chose.

`--from FOLDER`, a new run: the folder defines the model, and a flag, file or preset that makes another one of it is a problem: its weights
would mean something else, or not fit. What a run may choose (data, layout, precision, dropout, the length of its samples) stays free. The
weights are those of `--pretrained-checkpoint`, so they reshard to any layout, and a restart that finds a checkpoint in `--load` continues
that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import Problem
from petatron.base.model_folder_file_names import is_hf_folder
from petatron.config.flags.parse_command_line import FROM_FLAG
from petatron.config.schema.checkpoint import CheckpointConfig
from petatron.config.schema.fields import FieldInfo, FieldValue, all_fields, fields_by_path, unflatten_config
from petatron.config.schema.model import REQUIRED_FIELDS
from petatron.config.schema.model_identity import MODEL_SECTIONS, identity_differences, is_identity_field
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import Setting, SourcedValues, ValueOrigin

CHECKPOINT_ARGS_FLAG, MP_ARGS_FLAG = "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"
_VIRTUAL_STAGES = "parallel.num_virtual_stages_per_pipeline_rank"
_VIRTUAL_STAGES_FOLLOW = (
    "parallel.num_layers_per_virtual_pipeline_stage",
    "parallel.pipeline_model_parallel_layout",
)
_LAYOUT = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    *_VIRTUAL_STAGES_FOLLOW,
    _VIRTUAL_STAGES,
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
    "parallel.encoder_pipeline_model_parallel_size",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
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
    config: RawRunConfig, given: SourcedValues, read: ReadCheckpointSettings | None
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
    return _apply_settings(stored, checkpoint, given)


def unknown_settings(*problems: Problem) -> AppliedSettings:
    """The result where nothing could be read: every value is in doubt, so only these problems are reported."""
    flags = frozenset(info.flag for info in all_fields())
    return AppliedSettings({}, NO_SETTINGS.origin, problems=problems, doubtful_flags=flags)


def unknown_to_command(flag: str, value: str = "") -> Problem:
    """The problem of a command that reads no checkpoints."""
    fix = "Use it with `petatron train`, or describe the model by flags."
    return Problem(flag, value, "is not known to this command", fix)


def _apply_settings(stored: CheckpointSettings, checkpoint: CheckpointConfig, given: SourcedValues) -> AppliedSettings:
    problems = tuple(unsupported_settings(CHECKPOINT_ARGS_FLAG, stored))
    if problems:
        return unknown_settings(*problems)
    stored_values = all_values(stored)
    wins = identity_paths(stored_values)
    if checkpoint.use_mp_args_from_checkpoint_args:
        wins += _LAYOUT
        if any(stored_values[path] for path in _VIRTUAL_STAGES_FOLLOW):
            stored_values[_VIRTUAL_STAGES] = None  # it follows from these
    taken = unchosen_values(stored, checkpoint, stored_values, given.origins) | {
        path: stored_values[path] for path in wins
    }
    gave_way = [
        f"{fields_by_path()[path].flag} {given.values[path]} (now {stored_values[path]})"
        for path in wins
        if given.origins[path].is_explicit and given.values[path] != stored_values[path]
    ]
    notices = (f"{CHECKPOINT_ARGS_FLAG}: {stored.source} takes the place of {', '.join(gave_way)}",) if gave_way else ()
    return AppliedSettings(taken, ValueOrigin("checkpoint", stored.source), notices, imports=stored.imports)


def unchosen_values(
    stored: CheckpointSettings,
    checkpoint: CheckpointConfig,
    stored_values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
) -> dict[str, FieldValue]:
    """Returns the checkpoint's settings of model and tokenizer that nobody chose otherwise; a tokenizer is chosen as a whole."""
    added = _addable_paths(stored_values)
    fills = [f"{section}.{name}" for section in MODEL_SECTIONS for name in stored.sections.get(section, {})]
    fills = [path for path in fills if path not in added]
    tokenizer = tokenizer_paths()
    chosen = any(origins[path].is_explicit for path in tokenizer)
    has_tokenizer = stored_values["tokenizer.tokenizer_type"] is not None
    if checkpoint.use_tokenizer_model_from_checkpoint_args and has_tokenizer and not chosen:
        fills += [path for path in tokenizer if stored_values[path] is not None]
    return {path: stored_values[path] for path in fills if path in stored_values and not origins[path].is_explicit}


def tokenizer_paths() -> list[str]:
    """Returns the settings that choose a tokenizer."""
    return [info.path for info in all_fields() if info.section == "tokenizer" and "one start" not in info.marks]


def identity_paths(stored_values: Mapping[str, FieldValue]) -> tuple[str, ...]:
    """Returns the settings that must match the weights. Learned positions are weights, one for each position."""
    added = _addable_paths(stored_values)
    paths = [info.path for info in all_fields() if info.section in MODEL_SECTIONS and is_identity_field(info.name)]
    paths = [path for path in paths if path not in added]
    learned = stored_values["model.position_embedding_type"] == "learned_absolute"
    learned = learned or bool(stored_values.get("model.learned_position_table"))
    return (*paths, *["model.max_position_embeddings"] * learned)


def _addable_paths(stored_values: Mapping[str, FieldValue]) -> frozenset[str]:
    """Returns the settings of features that a model does not have, and that a run which starts from it may add."""
    run = unflatten_config(stored_values)
    return frozenset(
        info.path
        for info in all_fields()
        if info.section in MODEL_SECTIONS and info.feature.may_be_added and info.feature.unused_reason(run) is not None
    )


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


WEIGHTS_PATH = "checkpoint.pretrained_checkpoint"


def apply_from_folder(
    folder: str, config: RawRunConfig, given: SourcedValues, read: ReadCheckpointSettings | None
) -> AppliedSettings:
    """Returns the settings of the model in a folder, what of it was taken as a notice, and every contradiction."""
    conflicts = list(_conflicts(folder, config.checkpoint))
    if conflicts:
        return unknown_settings(*conflicts)
    if read is None:
        return unknown_settings(unknown_to_command(FROM_FLAG, folder))
    stored = read(config.checkpoint, folder)
    unsupported = list(unsupported_settings(FROM_FLAG, stored))
    if unsupported:
        return unknown_settings(*unsupported)
    stored_values = all_values(stored)
    taken = unchosen_values(stored, config.checkpoint, stored_values, given.origins)
    taken |= {path: stored_values[path] for path in identity_paths(stored_values)}
    return AppliedSettings(
        taken,
        ValueOrigin("checkpoint", stored.source),
        notices=(_taken_notice(folder, stored, taken, config.checkpoint),),
        problems=tuple(_contradictions(stored, stored_values, given)),
        imports=stored.imports,
    )


def weights_folder(folder: str, settings: AppliedSettings) -> str:
    """Returns the folder of the weights: as it was given, or where a name on the hub, or a config.json, is on this machine."""
    return folder if os.path.isdir(folder) or not settings.origin.detail else settings.origin.detail


def shape_of_folder(
    folder: str, checkpoint: CheckpointConfig, read: ReadCheckpointSettings | None
) -> tuple[list[Setting], list[Problem]]:
    """Returns the settings of the model in a folder and of its tokenizer as those of any other source, for a toy of it; or why not."""
    if read is None:
        return [], [unknown_to_command(FROM_FLAG, folder)]
    stored = read(checkpoint, folder)
    if unsupported := list(unsupported_settings(FROM_FLAG, stored)):
        return [], unsupported
    stored_values, origin = all_values(stored), ValueOrigin("checkpoint", stored.source)
    sections = (*MODEL_SECTIONS, "tokenizer")
    paths = [f"{section}.{name}" for section in sections for name in stored.sections.get(section, {})]
    return [
        Setting(path, stored_values[path], origin)
        for path in paths
        if path in stored_values and stored_values[path] is not None
    ], []


def hf_load_settings(config: RawRunConfig) -> AppliedSettings:
    """Reports a `--load` of a Hugging Face folder that no run can go on with, or whose model nobody described."""
    load, model = config.checkpoint.load, config.model
    described = config.checkpoint.finetune and all(getattr(model, name) for name in REQUIRED_FIELDS)
    if load is None or described or config.checkpoint.use_checkpoint_args or not is_hf_folder(Path(load)):
        return NO_SETTINGS
    rule = "is the folder of a Hugging Face model: there are weights, but no run to go on with"
    fix = f"Use {FROM_FLAG} {load} instead, which takes the model's settings, tokenizer and weights."
    sections = (*MODEL_SECTIONS, "tokenizer", "checkpoint")
    doubtful = frozenset(info.flag for info in all_fields() if info.section in sections)
    problems = (Problem("--load", load, rule, fix),)
    return AppliedSettings({}, NO_SETTINGS.origin, problems=problems, doubtful_flags=doubtful)


def _conflicts(folder: str, checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Yields other flags that say where the model or its weights come from."""
    load, step = checkpoint.load, checkpoint.ckpt_step
    save = checkpoint.save
    restarts = None not in (load, save) and os.path.realpath(str(load)) == os.path.realpath(str(save))
    if checkpoint.use_checkpoint_args:
        rule = f"cannot be combined with {CHECKPOINT_ARGS_FLAG}, which takes the model from --load"
        yield Problem(FROM_FLAG, folder, rule, "Keep one of them.")
    if load is not None and not restarts:
        rule = f"cannot be combined with --load {load}: both say where the weights come from"
        fix = (
            "Leave --load out to start a new run, or this one to continue that run. (Only the --save folder may be loaded too, so "
            "that a restart continues.)"
        )
        yield Problem(FROM_FLAG, folder, rule, fix)
    if checkpoint.pretrained_checkpoint is not None:
        rule = f"cannot be combined with --pretrained-checkpoint {checkpoint.pretrained_checkpoint}: both name the first weights"
        yield Problem(FROM_FLAG, folder, rule, "Keep one of them.")
    if checkpoint.finetune:
        rule = f"is for --load; {FROM_FLAG} takes the weights alone anyway"
        yield Problem("--finetune", "", rule, "Leave it out.")
    if step is not None and not restarts:
        fix = f"Give the step itself: {FROM_FLAG} {os.path.join(folder, f'step-{step:08d}')}."
        yield Problem("--ckpt-step", str(step), f"is for --load, and does not choose a step of {FROM_FLAG}", fix)


def _contradictions(
    stored: CheckpointSettings, stored_values: Mapping[str, FieldValue], given: SourcedValues
) -> Iterator[Problem]:
    """Yields every setting that someone chose and that makes another model; those of a preset are one problem."""
    values, origins = given.values, given.origins
    chosen = [path for path in identity_paths(stored_values) if origins[path].is_explicit]
    theirs = {path.partition(".")[2]: value for path, value in stored_values.items()}
    ours = theirs | {path.partition(".")[2]: values[path] for path in chosen}
    differing = set(identity_differences(ours, theirs))
    if theirs["max_position_embeddings"] != ours["max_position_embeddings"]:
        differing.add("max_position_embeddings")  # among the chosen if positions are learned
    of_presets: dict[str, list[str]] = {}
    for path in chosen:
        info = fields_by_path()[path]
        if info.name not in differing:
            continue
        origin = origins[path]
        if origin.kind == "preset":
            of_presets.setdefault(origin.detail, []).append(
                f"{info.flag} {values[path]}, and the folder has {stored_values[path]}"
            )
            continue
        where = "" if origin.kind == "flag" else f" ({origin})"
        rule = f"contradicts {FROM_FLAG} {stored.source}, whose model has {stored_values[path]}{where}"
        yield Problem(info.flag, str(values[path]), rule, "Leave it out.")
    for preset, differences in of_presets.items():
        rule = f"contradicts {FROM_FLAG} {stored.source} ({'; '.join(differences)})"
        yield Problem("--preset", preset, rule, "Leave it out: the folder says what the model is.")


def _taken_notice(
    folder: str, stored: CheckpointSettings, taken: Mapping[str, FieldValue], checkpoint: CheckpointConfig
) -> str:
    experts = taken["moe.num_experts"]
    model = ", ".join(
        [
            f"{taken['model.num_layers']} layers",
            f"hidden size {taken['model.hidden_size']}",
            f"{taken['model.num_attention_heads']} heads",
            *([f"{experts} experts"] if experts is not None else []),
            f"vocabulary {taken['model.vocab_size']}",
        ]
    )
    if "tokenizer.tokenizer_type" in taken:
        place = taken.get("tokenizer.tokenizer_model") or taken.get("tokenizer.vocab_file")
        tokenizer = f"the tokenizer ({place or taken['tokenizer.tokenizer_type']})"
    elif stored.sections.get("tokenizer"):
        tokenizer = "not the tokenizer, since another one is given"
    else:
        tokenizer = "no tokenizer, since there is none"
    unless = "" if checkpoint.load is None else f", unless {checkpoint.load} has a checkpoint to continue"
    place = "" if stored.source == folder else f" ({stored.source})"
    if not stored.has_weights:
        return f"{FROM_FLAG} {folder}{place} gives the model ({model}) and {tokenizer}; there are no weights beside it"
    return (
        f"{FROM_FLAG} {folder}{place} gives this run the model ({model}), {tokenizer}, and the weights{unless}; the optimizer is "
        "fresh, at iteration 0"
    )
