"""Ports a Megatron script or functional-test file to a run of ours: settings, everything that blocks, and what is only named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from petatron.base.errors import PetatronError, Problem
from petatron.base.format_text import count_with_noun
from petatron.config.flags.megatron_flags import MEGATRON_DEFAULTS, MEGATRON_DEFAULTS_FLAG
from petatron.config.flags.megatron_semantics import dependent_defaults
from petatron.config.flags.parse_command_line import SPLIT_DATA_FLAG, parse_flags
from petatron.config.per_split_data_file import UNREADABLE
from petatron.config.read_config_sources import RawLoadedConfig
from petatron.config.schema.fields import FieldValue, fields_by_name, fields_by_path, flag_name
from petatron.config.value_origins import Setting
from petatron.port.find_launch_command import TrainingLaunch, implied_flags, script_problem
from petatron.port.port_flags import PortedFlag, PortedFlags, port_flags, spelled, unquoted
from petatron.port.ported_yaml import ported_yaml
from petatron.port.read_script import (
    MissingVariable,
    ScriptFile,
    check_options,
    missing_variables,
    note_line,
)
from petatron.port.shell_interpreter import ScriptNote
from petatron.port.shell_values import ShellText
from petatron.validate import resolve_config
from petatron.validate.preflight import preflight

_CHECKPOINT_ARGS = "--use-checkpoint-args"
_MOST_RANKS = 1 << 24
"""A slipped digit of a size is a problem of that size, not of how many ranks it would take."""
_SPELLED = {"rope_scaling_factor": "--rotary-scaling-factor"}
"""Flags of defaults where Megatron reads another spelling than ours."""


@dataclass(frozen=True, slots=True)
class PortedRun:
    """What a script becomes. `problems` are of the settings together, `absent_files` only of this machine.

    fewest_ranks: of its layout, where the script does not say how many it starts.
    """

    script: ScriptFile
    flags: PortedFlags
    missing: tuple[MissingVariable, ...]
    notes: tuple[ScriptNote, ...]
    problems: tuple[Problem, ...]
    absent_files: tuple[Problem, ...]
    script_problem: str | None
    world_size: int | None
    fewest_ranks: int

    @property
    def settings(self) -> tuple[tuple[Setting, PortedFlag], ...]:
        return self.flags.settings

    @property
    def blocks(self) -> bool:
        """Whether the run cannot start as the script says."""
        return bool(self.script_problem or self.missing or self.problems or self.flags.of_kind("blocking"))

    @property
    def launch(self) -> TrainingLaunch:
        return self.script.launch

    @property
    def planned_world_size(self) -> int:
        return self.world_size or self.fewest_ranks

    @property
    def title(self) -> str:
        return self.script.title

    @property
    def typed_flags(self) -> list[str]:
        """The flags that start the run beside its file; names of the environment are in them as `${NAME}`."""
        return [
            text.text for ported in self.flags.of_kind("typed") for text in (ported.flag, *ported.values) if text.text
        ]

    @property
    def summary(self) -> str:
        """The number of flags of each kind."""
        names = {"kept": "kept", "translated": "translated", "implied": "dropped as implied", "left out": "left out"}
        counts = [f"{len(self.flags.of_kind(kind))} {name}" for kind, name in names.items()]  # type: ignore[arg-type]
        if typed := self.flags.of_kind("typed"):
            counts.append(f"{len(typed)} to type")
        counts.append(f"{len(self.flags.of_kind('blocking')) + len(self.missing)} blocking")
        if self.missing:
            counts[-1] += f" ({count_with_noun(len(self.missing), 'variable')} without a value)"
        flags = [answer for answer in self.flags.all_flags if not answer.flag.is_bare]
        return f"{count_with_noun(len(flags), 'flag')}: {', '.join(counts)}"

    def groups(self) -> list[tuple[str, list[str]]]:
        """Everything besides the settings, as headings with lines."""
        blocking = [f"{self.launch.script} {self.script_problem}"] if self.script_problem else []
        blocking += [_line(answer, _remedy(answer)) for answer in self.flags.of_kind("blocking")]
        translated = [_line(answer, f"is {self._made_by(answer)}") for answer in self.flags.of_kind("translated")]
        blocking += [str(variable) for variable in self.missing]
        return [
            ("Blocking", blocking),
            ("Problems of the settings together", [str(problem) for problem in self.problems]),
            ("Translated", translated),
            (
                "To type after `petatron train`",
                [_line(ported, ported.why, ":") for ported in self.flags.of_kind("typed")],
            ),
            ("Dropped as implied", [_line(answer, answer.why, ":") for answer in self.flags.of_kind("implied")]),
            ("Left out as asked", [_line(answer, "") for answer in self.flags.of_kind("left out")]),
            ("Not evaluated, or not as written", [note_line(note) for note in self.notes]),
            ("Not on this machine, which does not block", [str(problem) for problem in self.absent_files]),
        ]

    def yaml(self) -> str:
        """Returns the file for `petatron train --config`."""
        return ported_yaml(f"{self.title}; {self.summary}", self.settings, self.groups())

    def _made_by(self, ported: PortedFlag) -> str:
        made = [setting for setting, maker in self.settings if maker == ported]
        return ", ".join(f"{setting.path.partition('.')[2]}: {setting.value}" for setting in made)


def port_script(script: ScriptFile, *, left_out: Iterable[str] = (), world_size: int | None = None) -> PortedRun:
    """Answers the flags of a script that trains, and checks them together."""
    launch, notes = script.launch, list(script.notes)
    removed = {spelled(name if name.startswith("-") else f"--{name}") for name in left_out}
    implied = [ShellText(flag, launch.line) for flag in implied_flags(launch.script)]
    typed = [unquoted(text) for text in launch.flags]
    implied += [ShellText(word, launch.line) for word in _default_flags([text.text for text in typed])]
    notes += [
        ScriptNote(text.line, f"the quotes in {text.text} would be part of the value; they are removed")
        for text, plain in zip(launch.flags, typed)
        if text != plain
    ]
    flags = port_flags([*implied, *typed], removed)
    check_options(script, [ported.flag for ported in flags.all_flags], removed)
    size, fewest = world_size or launch.world_size, _fewest_ranks(flags)
    loaded, problems, check_notes = _check(flags, size or fewest)
    if loaded is not None and loaded.config.parallel.pipeline_model_parallel_layout is None:
        layout = fields_by_name()["pipeline_model_parallel_layout"].path  # of a pattern's bars, for one pipeline rank
        flags = replace(flags, settings=tuple(item for item in flags.settings if item[0].path != layout))
    users = [
        (spelled(answer.flag.text), text)
        for answer in flags.of_kind("missing")
        for text in (answer.flag, *answer.values)
        if not answer.flag.is_bare
    ]
    users += [("", text) for text in flags.bare_names]
    missing = missing_variables(script, users)
    unknown = [name for name in launch.unknown_counts if name not in {variable.name for variable in missing}]
    if unknown:
        counts = (
            f"nodes and ranks: the number is not known without {' and '.join(f'--set {name}=N' for name in unknown)}"
        )
        notes.append(ScriptNote(launch.line, counts))
    absent = [] if loaded is None else [problem for problem in preflight(loaded.config) if "${" not in problem.value]
    unread = [
        problem for problem in problems if problem.where == SPLIT_DATA_FLAG and problem.rule.startswith(UNREADABLE)
    ]
    return PortedRun(
        script,
        flags,
        missing,
        (*notes, *check_notes),
        tuple(problem for problem in problems if problem not in unread),
        (*unread, *absent),
        script_problem(launch.script),
        size,
        fewest,
    )


def _default_flags(argv: Sequence[str]) -> list[str]:
    """Returns Megatron's defaults that a script relies on, where ours are others."""
    parsed = parse_flags([MEGATRON_DEFAULTS_FLAG, *argv])
    given = {setting.path: setting.value for setting in parsed.settings}
    named = {path.partition(".")[2]: value for path, value in given.items()}
    relied_on = {"fp8_recipe": bool(named.get("fp8_format")), "muon_momentum": named.get("optimizer") == "muon"}
    made: dict[str, FieldValue] = {
        name: value for name, value in MEGATRON_DEFAULTS.items() if relied_on[name] and name not in named
    }
    if not any(spelled(word) == _CHECKPOINT_ARGS for word in argv):  # else the checkpoint says it
        values = {path: info.default for path, info in fields_by_path().items()} | given
        for path, value in dependent_defaults(values, exact_gelu=parsed.exact_gelu):
            if path not in given:
                made[path.partition(".")[2]] = value
    if named.get("multi_latent_attention") and not _names_positions(argv):  # it has a table beside its rotation
        made["position_embedding_type"] = "learned_absolute"
    return [word for name, value in made.items() for word in (_SPELLED.get(name) or flag_name(name), str(value))]


def _names_positions(argv: Sequence[str]) -> bool:
    return any(
        setting.path == fields_by_name()["position_embedding_type"].path for setting in parse_flags(argv).settings
    )


def _fewest_ranks(flags: PortedFlags) -> int:
    """Returns the fewest ranks that the layout of layers and that of experts, which share them, both divide."""
    values = {setting.path.partition(".")[2]: setting.value for setting, _ in flags.settings}

    def size(name: str, default: int = 1) -> int:
        value = values.get(name)
        return value if isinstance(value, int) and value > 0 else default

    tensor, stages = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    replicas = size("data_parallel_size", size("num_distributed_optimizer_instances"))
    ranks = tensor * stages * size("context_parallel_size") * replicas
    if "num_experts" in values:
        copies = size("expert_model_parallel_size") * size("expert_tensor_parallel_size", tensor) * stages
        ranks = math.lcm(ranks, copies)
    return min(ranks, _MOST_RANKS)


def _check(
    flags: PortedFlags, world_size: int | None
) -> tuple[RawLoadedConfig | None, list[Problem], list[ScriptNote]]:
    """Returns the config, and the problems of all flags together that no flag alone has."""
    argv, notes = [MEGATRON_DEFAULTS_FLAG, *flags.argv], []
    try:
        loaded, problems = resolve_config(argv, world_size=world_size)
    except PetatronError as error:
        kept = [text for text in argv if spelled(text) != _CHECKPOINT_ARGS]
        if len(kept) == len(argv):
            return None, [Problem("the settings", "", f"cannot be read: {error}", "")], notes
        notes.append(ScriptNote(0, f"{_CHECKPOINT_ARGS} is checked only where the checkpoint is: {error}"))
        loaded, problems = resolve_config(kept, world_size=world_size)
    if any(item.where == _CHECKPOINT_ARGS for item in problems) and _CHECKPOINT_ARGS in map(spelled, argv):
        rest = [text for text in argv if spelled(text) != _CHECKPOINT_ARGS]
        notes.append(
            ScriptNote(0, f"{_CHECKPOINT_ARGS} is applied when the run starts; the flags are checked without it")
        )
        loaded, problems = resolve_config(rest, world_size=world_size)
    told = [problem for answer in flags.all_flags for problem in answer.problems]
    unknown = {answer.flag.text.partition("=")[0] for answer in flags.of_kind("missing", "typed") if answer.missing}
    return loaded, [item for item in problems if item not in told and item.where not in unknown], notes


def _line(ported: PortedFlag, text: str, separator: str = "") -> str:
    line = f" (line {ported.flag.line})" if ported.flag.line else ""
    return f"{ported.text}{line}{separator} {text}".rstrip()


def _remedy(ported: PortedFlag) -> str:
    return (
        f"{ported.why} Or --without {spelled(ported.flag.text)[2:]}"
        if ported.flag.text.startswith("--")
        else ported.why
    )
