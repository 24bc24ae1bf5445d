"""Ports a Megatron inference script to a command of ours, `petatron generate` or `petatron serve`, and lists every blocking flag.

The checkpoint describes the model, so only flags of layout, precision and sampling become ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from petatron.base.errors import Problem
from petatron.port.environment_variable_names import is_of_environment, shell_quoted
from petatron.port.find_launch_command import INFERENCE_SCRIPTS
from petatron.port.inference_flags import COORDINATOR, InferenceArguments, read_arguments, sampling_flags, serve_flags
from petatron.port.port_flags import grouped_flags, spelled, unquoted
from petatron.port.read_script import MissingVariable, ScriptFile, check_options, missing_variables, note_line
from petatron.port.shell_values import ShellText

_LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
_SERVER_OPTIONS = ("--host", "--port")
_FlagGroup = tuple[ShellText, tuple[ShellText, ...]]
"""A flag with its values."""


@dataclass(frozen=True, slots=True)
class PortedInference:
    """The command that a script becomes, as `argv`; `accepted` says what becomes of flags that are no part of it."""

    script: ScriptFile
    argv: tuple[str, ...]
    accepted: tuple[str, ...]
    problems: tuple[Problem, ...]
    missing: tuple[MissingVariable, ...]
    world_size: int | None

    @property
    def blocks(self) -> bool:
        return bool(self.problems or self.missing)

    @property
    def command(self) -> str:
        return " ".join(map(shell_quoted, ("petatron", *self.argv)))

    def groups(self) -> list[tuple[str, list[str]]]:
        """Everything besides the command, as headings with lines."""
        return [
            ("Blocking", [*map(str, self.problems), *map(str, self.missing)]),
            ("Accepted without an effect, or with another", list(self.accepted)),
            ("Not evaluated, or not as written", [note_line(note) for note in self.script.notes]),
        ]


def answers_prompts(script: ScriptFile) -> bool:
    """Whether a script generates text or serves a model."""
    return PurePosixPath(script.launch.script).name in INFERENCE_SCRIPTS


def port_inference(
    script: ScriptFile, *, left_out: Iterable[str] = (), world_size: int | None = None
) -> PortedInference:
    """Returns the command that answers the same prompts, or serves the same model."""
    groups = grouped_flags([unquoted(text) for text in script.launch.flags])
    removed = {spelled(name if name.startswith("-") else f"--{name}") for name in left_out}
    check_options(script, [flag for flag, _ in groups], removed)
    kept = [group for group in groups if spelled(group[0].text) not in removed]
    size = world_size or script.launch.world_size
    subcommand = INFERENCE_SCRIPTS[PurePosixPath(script.launch.script).name]
    of_server = [group for group in kept if subcommand == "serve" and spelled(group[0].text) in _SERVER_OPTIONS]
    arguments = read_arguments(list(_typed_texts(group for group in kept if group not in of_server)))
    argv = _generate(arguments) if subcommand == "generate" else [*_typed_texts(of_server), *serve_flags(arguments)]
    checkpoint = arguments.checkpoint or ""
    if not checkpoint:
        arguments.problems.append(Problem("--load", "", "is not given", "Name the folder of a checkpoint."))
    if COORDINATOR in {spelled(flag.text) for flag, _ in kept}:
        argv += _replicas(argv, size)
    users = [
        user
        for group in groups
        for user in _needing_a_value(*group)
        if group in kept or (not user[0] and _solid(group[1]))  # behind the value of a flag that is left out
    ]
    blocked = {flag for flag, _ in users}
    return PortedInference(
        script,
        (subcommand, checkpoint, *argv),
        tuple(arguments.notices),
        tuple(problem for problem in arguments.problems if problem.where not in blocked),
        missing_variables(script, users),
        size,
    )


def _typed_texts(groups: Iterable[_FlagGroup]) -> Iterator[str]:
    """Yields flags with their values, without words that are nothing but a name without a value behind another value."""
    for flag, values in groups:
        if not flag.is_bare:
            yield flag.text
            yield from (value.text for value in _solid(values) or values)


def _solid(values: Sequence[ShellText]) -> list[ShellText]:
    return [value for value in values if not value.is_bare]


def _needing_a_value(flag: ShellText, values: Sequence[ShellText]) -> Iterator[tuple[str, ShellText]]:
    """Yields the words with a name whose value is needed, each with its flag; a word that may be flags of its own has none."""
    solid = _solid(values)
    for text in (flag, *values):
        if any(not is_of_environment(name) for name in text.missing):
            yield "" if flag.is_bare or (text.is_bare and solid) else flag.text, text


def _generate(arguments: InferenceArguments) -> list[str]:
    """Returns the flags of `petatron generate` behind the checkpoint."""
    flags = sampling_flags(arguments)
    if arguments.prompt_file is not None:
        limit = arguments.prompt_limit
        if limit is not None:
            arguments.notices.append(f"all prompts of the file are answered: keep {limit} of its lines for as many")
        return ["--prompts", arguments.prompt_file, "--out", arguments.output_path or "answers.jsonl", *flags]
    if not arguments.prompts:
        arguments.notices.append("the prompts are in the Python script: give them with --prompt TEXT")
        arguments.prompts.append("Once upon a time")
    if arguments.output_path is not None:
        arguments.notices.append("answers are printed: for a file, give --prompts FILE.jsonl --out ANSWERS.jsonl")
    return [*(word for prompt in arguments.prompts for word in ("--prompt", prompt)), *flags]


def _replicas(argv: Sequence[str], world_size: int | None) -> list[str]:
    """Returns the number of replicas that share the requests, where the ranks are known."""
    ranks = 1
    for name in _LAYOUT:
        ranks *= int(argv[argv.index(name) + 1]) if name in argv else 1
    return ["--dp", str(world_size // ranks)] if world_size and world_size > ranks and world_size % ranks == 0 else []
