"""`--from FOLDER`: a new run of a model that exists, which is one more source of settings.

The folder defines the model, and a flag, file or preset that makes another one of it is a problem: its weights would mean something
else, or not fit. What a run may choose (data, layout, precision, dropout, the length of its samples) stays free. The weights are those
of `--pretrained-checkpoint`, so they reshard to any layout, and a restart that finds a checkpoint in `--load` continues that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from petatron.base.errors import Problem
from petatron.base.model_companion_files import is_hf_folder
from petatron.config.checkpoint_settings import (
    CHECKPOINT_ARGS_FLAG,
    MODEL_SECTIONS,
    NO_SETTINGS,
    AppliedSettings,
    CheckpointSettings,
    ReadCheckpointSettings,
    all_values,
    identity_paths,
    unchosen_values,
    unknown_settings,
    unknown_to_command,
    unsupported_settings,
)
from petatron.config.flags.parse import FROM_FLAG
from petatron.config.schema.fields import FieldValue, all_fields, fields_by_path
from petatron.config.schema.model import REQUIRED_FIELDS
from petatron.config.schema.model_identity import identity_differences
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.training import CheckpointConfig
from petatron.config.value_origins import Setting, ValueOrigin

WEIGHTS_PATH = "checkpoint.pretrained_checkpoint"


def apply_from_folder(
    folder: str,
    config: RawRunConfig,
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
    read: ReadCheckpointSettings | None,
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
    found = all_values(stored)
    taken = unchosen_values(stored, config.checkpoint, found, origins)
    taken |= {path: found[path] for path in identity_paths(found)}
    return AppliedSettings(
        taken,
        ValueOrigin("checkpoint", stored.source),
        notices=(_taken_notice(folder, stored, taken, config.checkpoint),),
        problems=tuple(_contradictions(stored, found, values, origins)),
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
    found, origin = all_values(stored), ValueOrigin("checkpoint", stored.source)
    sections = (*MODEL_SECTIONS, "tokenizer")
    paths = [f"{section}.{name}" for section in sections for name in stored.sections.get(section, {})]
    return [Setting(path, found[path], origin) for path in paths if path in found and found[path] is not None], []


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
    restarts = load is not None and checkpoint.save is not None and _same_path(load, checkpoint.save)
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
    stored: CheckpointSettings,
    found: Mapping[str, FieldValue],
    values: Mapping[str, FieldValue],
    origins: Mapping[str, ValueOrigin],
) -> Iterator[Problem]:
    """Yields every setting that someone chose and that makes another model; those of a preset are one problem."""
    chosen = [path for path in identity_paths(found) if origins[path].is_explicit]
    theirs = {path.partition(".")[2]: value for path, value in found.items()}
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
                f"{info.flag} {values[path]}, and the folder has {found[path]}"
            )
            continue
        where = "" if origin.kind == "flag" else f" ({origin})"
        rule = f"contradicts {FROM_FLAG} {stored.source}, whose model has {found[path]}{where}"
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


def _same_path(first: str, second: str) -> bool:
    return os.path.realpath(first) == os.path.realpath(second)
