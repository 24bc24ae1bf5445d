"""Reads argv, a preset and files into one config that records the origin of each value.

Order: schema defaults, then the preset, then files in the order given, then flags; later wins. With `--use-checkpoint-args` or `--from`
a model that exists is one more source, which defines it (`settings_from_checkpoint.py`). Before flags are applied, the model is adapted
to them (`adapt/`): `--toy`, fewer layers than a preset's patterns have, values that they make meaningless. What is still unset is
derived. What is read here is not checked yet: `validate/load_checked_config.py` asks every rule, raises all problems together, and
resolves a config without any: `RunConfig` instead of `RawRunConfig`. Nothing changes a config after that, except `with_vocab_size` and
`pretrained/open_tokenizer.py`, which fill in what only a tokenizer's file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from petatron.base.errors import ConfigError, PetatronError, Problem
from petatron.config.adapt.adapt_preset_to_flags import AdaptedModel, adapt_model
from petatron.config.derived_defaults import derive_defaults
from petatron.config.flags.megatron_flags import MEGATRON_DEFAULTS, NO_POSITION_EMBEDDING
from petatron.config.flags.megatron_semantics import dependent_defaults
from petatron.config.flags.parse_command_line import FROM_FLAG, ParsedFlags, parse_flags
from petatron.config.flags.sft_flag import SFT_FLAG, SFT_ORIGIN, is_sft_default, sft_defaults
from petatron.config.hybrid_pattern_stage_bars import drop_bars_of_one_rank
from petatron.config.import_user_modules import (
    IMPORTS_PATH,
    NamedImport,
    absolute_import,
    import_modules,
    module_file_name,
)
from petatron.config.per_split_data_file import read_split_data
from petatron.config.presets import preset_names, read_preset
from petatron.config.schema.fields import (
    FieldValue,
    all_fields,
    fields_by_name,
    fields_by_path,
    flatten_config,
    unflatten_config,
)
from petatron.config.schema.run import RawRunConfig, RunConfig
from petatron.config.schema.sections.rope import ROTARY_TYPES
from petatron.config.settings_from_checkpoint import (
    WEIGHTS_PATH,
    AppliedSettings,
    ReadCheckpointSettings,
    apply_checkpoint_settings,
    apply_from_folder,
    hf_load_settings,
    shape_of_folder,
    unknown_settings,
    weights_folder,
)
from petatron.config.unused_settings import unused_flag_notices, unused_settings
from petatron.config.value_origins import Setting, SourcedValues, ValueOrigin
from petatron.config.yaml_file import ParsedYaml, read_yaml_file

_OF_MEGATRON = ValueOrigin("default", "of Megatron")


@dataclass(frozen=True, slots=True)
class RawLoadedConfig:
    """A config with values derived as far as possible, the origin of every value by path, and notices for the user."""

    config: RawRunConfig
    origins: dict[str, ValueOrigin]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedConfig(RawLoadedConfig):
    """A loaded config without problems, resolved."""

    config: RunConfig


class ConfigSources(TypedDict, total=False):
    """Where settings come from besides flags.

    `world_size` is the launcher's number of ranks. `read_checkpoint` reads the settings of the checkpoint in `--load` for
    `--use-checkpoint-args`, or of the folder of `--from`.
    """

    preset: str | None
    files: Sequence[str | Path]
    world_size: int | None
    read_checkpoint: ReadCheckpointSettings | None


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A config as its sources say, derived but not checked; only `petatron.validate` makes a `LoadedConfig` of one.

    `doubtful_flags` have values that could not be read, which is among the problems already.
    """

    loaded: RawLoadedConfig
    problems: list[Problem]
    doubtful_flags: set[str]


def parse_config(
    argv: Sequence[str] = (),
    *,
    preset: str | None = None,
    files: Sequence[str | Path] = (),
    world_size: int | None = None,
    read_checkpoint: ReadCheckpointSettings | None = None,
) -> ParsedConfig:
    """Reads all sources (`ConfigSources`) and derives what they leave open."""
    flags = parse_flags(argv, presets=None if preset or files else preset_names())
    if flags.split_data_file is not None:
        settings, unread = read_split_data(flags.split_data_file)
        flags.settings += settings
        flags.problems += unread
        flags.doubtful_flags |= {"--data-path", "--train-data-path"} if unread else set()
    name = flags.preset or preset
    documents = [read_preset(name)] if name else []
    documents += [read_yaml_file(path) for path in [*files, *flags.files]]
    problems = [problem for source in (*documents, flags) for problem in source.problems]
    suspects = {flag for source in (*documents, flags) for flag in source.doubtful_flags}

    values, origins, adapted = _merge_sources(documents, flags, read_checkpoint)
    problems += adapted.problems
    suspects |= {info.flag for info in all_fields()} if adapted.problems else set()
    stored = _settings_of_model(flags, SourcedValues(values, origins), read_checkpoint, other_problems=bool(problems))
    values |= stored.values
    origins |= dict.fromkeys(stored.values, stored.origin)
    if flags.from_folder is not None and not flags.toy:
        values[WEIGHTS_PATH] = weights_folder(flags.from_folder, stored)
        origins[WEIGHTS_PATH] = ValueOrigin("flag", FROM_FLAG)
    problems += stored.problems
    suspects |= stored.doubtful_flags
    named = _named_imports([setting for source in (*documents, flags) for setting in source.settings], stored)
    values[IMPORTS_PATH] = tuple(dict.fromkeys(module.name for module in named))
    problems += import_modules(named)
    of_bars = drop_bars_of_one_rank(values, origins)
    given = {path for path, origin in origins.items() if origin.is_explicit}
    raw = unflatten_config(values)
    problems += _source_problems(raw, flags, world_size)
    if "--fp8-format" not in suspects:
        problems += _recipe_without_format(raw, origins)
    config, derived = derive_defaults(raw, chosen_paths=given, world_size=world_size)
    typed = {path: origins[path] for path in given}
    origins |= derived
    # A switch that nobody set but derivation turned on: someone comparing with another system needs to know.
    switch = origins["parallel.sequence_parallel"]
    is_on = config.parallel.sequence_parallel and switch.kind == "derived"
    switches = [f"sequence parallelism is on: {switch.detail}"] if is_on else []
    notices = (
        *flags.all_notices,
        *of_bars,
        *adapted.notices,
        *stored.notices,
        *switches,
        *_default_notice(config, origins),
        *_sft_notice(config, origins),
        *unused_flag_notices(config, origins | typed),
    )
    return ParsedConfig(RawLoadedConfig(config, origins, notices), problems, suspects)


def _named_imports(settings: Sequence[Setting], stored: AppliedSettings) -> list[NamedImport]:
    """Returns the modules that every source names: unlike other settings, those of one source do not replace another's.

    But a file that somebody types replaces a stored one of the same name: the module of a run that was moved, or edited in a copy.
    """
    modules = [NamedImport(name, stored.origin.detail) for name in stored.imports]
    for setting in settings:
        if setting.path == IMPORTS_PATH and isinstance(setting.value, tuple):
            file = None if setting.origin.kind == "flag" else str(setting.origin.detail)
            modules += [NamedImport(str(name), file) for name in setting.value]
    typed = {absolute_import(module.name) for module in modules if module.file is None}
    named = {absolute_import(module.name) for module in modules if module.file is not None}
    elsewhere = {module_file_name(name) for name in typed - named}
    replaced = {name for name in named if name in typed or module_file_name(name) in elsewhere}
    return [module for module in modules if module.file is None or absolute_import(module.name) not in replaced]


def _merge_sources(
    documents: Sequence[ParsedYaml], flags: ParsedFlags, read_checkpoint: ReadCheckpointSettings | None
) -> tuple[dict[str, FieldValue], dict[str, ValueOrigin], AdaptedModel]:
    """Returns the values of preset, files and flags with their origins, the model adapted to the flags."""
    values = {path: info.default for path, info in fields_by_path().items()}
    origins = dict.fromkeys(values, ValueOrigin("default"))
    if flags.megatron_defaults:
        _apply(values, origins, megatron_defaults())
    of_documents = [setting for document in documents for setting in document.settings]
    if flags.sft_files is not None:
        _apply(values, origins, sft_defaults([*of_documents, *flags.settings]))
    _apply(values, origins, of_documents)
    typed, unread = {setting.path: setting for setting in flags.settings}, list[Problem]()
    if flags.toy and flags.from_folder is not None:
        shape, unread = shape_of_folder(flags.from_folder, unflatten_config(values).checkpoint, read_checkpoint)
        _apply(values, origins, shape)
    given = SourcedValues(values, origins)
    adapted = AdaptedModel(problems=unread) if unread else adapt_model(given, typed, toy=flags.toy)
    values, origins = values | adapted.values, origins | adapted.origins
    _apply(values, origins, flags.settings)
    if flags.megatron_defaults:
        for path, value in dependent_defaults(values, exact_gelu=flags.exact_gelu):
            if origins[path].kind == "default":
                values[path], origins[path] = value, _OF_MEGATRON
    return values, origins, adapted


def _settings_of_model(
    flags: ParsedFlags, given: SourcedValues, read_checkpoint: ReadCheckpointSettings | None, *, other_problems: bool
) -> AppliedSettings:
    """Returns what the model that a run starts from says about itself, if the run asks for it.

    With `other_problems`, a model that cannot be read is one more of them; else the error of reading it says all.
    """
    config = unflatten_config(given.values)
    from_folder = None if flags.toy else flags.from_folder
    try:
        if from_folder is not None:
            return apply_from_folder(from_folder, config, given, read_checkpoint)
        if config.checkpoint.use_checkpoint_args:
            return apply_checkpoint_settings(config, given, read_checkpoint)
    except PetatronError as error:
        if not other_problems:
            raise
        where, folder = (FROM_FLAG, from_folder) if from_folder is not None else ("--load", config.checkpoint.load)
        unread = Problem(where, str(folder), f"cannot be read: {str(error).rstrip('.')}", "")
        return unknown_settings(*(error.problems if isinstance(error, ConfigError) else (unread,)))
    return hf_load_settings(config)


def megatron_defaults() -> list[Setting]:
    """Returns the defaults of Megatron's that change numbers, where ours are others."""
    return [Setting(fields_by_name()[name].path, value, _OF_MEGATRON) for name, value in MEGATRON_DEFAULTS.items()]


def _default_notice(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> list[str]:
    """Names the defaults of Megatron's that this run uses in the place of ours."""
    defaults = [info for info in all_fields() if origins[info.path] == _OF_MEGATRON]
    if not defaults:
        return []
    unused, values = unused_settings(config), flatten_config(config)
    used = [f"{info.flag} {values[info.path]}" for info in defaults if info.path not in unused]
    return [f"defaults of Megatron take the place of ours: {', '.join(used)}"] if used else []


def _sft_notice(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> list[str]:
    """Names the defaults of supervised fine-tuning that this run uses."""
    values = flatten_config(config)
    used = [
        f"{info.flag} {values[info.path]}{origins[info.path].detail.removeprefix(SFT_ORIGIN.detail)}"
        for info in all_fields()
        if is_sft_default(origins[info.path])
    ]
    return [f"defaults of {SFT_FLAG}: {', '.join(used)}"] if used else []


def with_vocab_size(loaded: LoadedConfig, vocab_size: int, why: str) -> LoadedConfig:
    """Returns the config with the tokenizer's vocabulary size; a larger explicit one takes precedence.

    A smaller one of a preset gives way to the tokenizer that a user chose.
    """
    path = "model.vocab_size"
    chosen, origin = loaded.config.model.vocab_size, loaded.origins[path]
    if chosen is not None and origin.is_explicit:
        if chosen >= vocab_size:
            return loaded
        if origin.kind not in ("preset", "adapted"):
            rule = f"is smaller than the {vocab_size} ids of {why}"
            raise ConfigError([Problem("--vocab-size", str(chosen), rule, f"Use {vocab_size} or more.")])
        notice = f"the {vocab_size} ids of {why} take the place of --vocab-size {chosen} ({origin})"
        loaded = replace(loaded, notices=(*loaded.notices, notice))
    model = replace(loaded.config.model, vocab_size=vocab_size)
    origins = loaded.origins | {path: ValueOrigin("derived", why)}
    return replace(loaded, config=replace(loaded.config, model=model), origins=origins)


def _apply(values: dict[str, FieldValue], origins: dict[str, ValueOrigin], settings: Sequence[Setting]) -> None:
    """Sets what a source says, in its order."""
    for setting in settings:
        values[setting.path], origins[setting.path] = setting.value, setting.origin


def _source_problems(config: RawRunConfig, flags: ParsedFlags, world_size: int | None) -> list[Problem]:
    """Checks how settings were given, which the final values no longer show."""
    problems: list[Problem] = []
    asked, drawing = config.parallel.world_size, config.rollout.rollout_ranks
    if world_size is not None and asked is not None and asked + drawing != world_size:
        beside = f" beside {drawing} that draw" if drawing else ""
        rule = f"is not the number of ranks that were started{beside}, {world_size - drawing}"
        problems.append(Problem("--world-size", str(asked), rule, f"Leave it out, or start {asked} ranks."))
    positions = config.model.position_embedding_type
    if flags.drops_learned_positions and positions in ROTARY_TYPES:
        flags.notices.append(f"{NO_POSITION_EMBEDDING} is accepted and changes nothing: positions are {positions}")
    elif flags.drops_learned_positions and positions != "none":
        rule = f"removes the learned positions, but --position-embedding-type is {positions}"
        problems.append(Problem(NO_POSITION_EMBEDDING, "", rule, "Use --position-embedding-type rope, or none."))
    return problems


def _recipe_without_format(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> list[Problem]:
    """A named recipe requires FP8, unless `fp8_format: none` is in the same source, or on the command line."""
    asked, switch = (origins[f"precision.{name}"].kind for name in ("fp8_recipe", "fp8_format"))
    if config.precision.fp8_format is not None or asked not in ("flag", "file") or switch in (asked, "flag"):
        return []
    rule = "says how FP8 scales are chosen, but --fp8-format is not set, so nothing would be in FP8"
    return [Problem("--fp8-recipe", config.precision.fp8_recipe, rule, "Add --fp8-format hybrid, or leave it out.")]
