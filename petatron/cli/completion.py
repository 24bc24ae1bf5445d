"""`petatron completion bash|zsh|fish`: a script that completes subcommands, flags, their choices, presets and paths.

It is generated from what the command line itself reads: the table of subcommands, the schema, and their parsers. zsh runs bash's script
through its compatibility layer. Nothing here imports torch, since a shell may run it at every start.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from petatron.cli import bench, posttrain, runs
from petatron.cli.subcommands import lm_eval_starter
from petatron.config.flags import megatron_flags
from petatron.config.flags.megatron_table import megatron_flags as megatron_table
from petatron.config.flags.parse_command_line import FILE_FLAG, PRESET_FLAG, known_flags
from petatron.config.presets import preset_names
from petatron.config.schema.fields import FieldInfo, fields_by_name

SHELLS = ("bash", "zsh", "fish")
_USAGE = """usage: petatron completion bash|zsh|fish

Prints a script that completes subcommands, flags, choices, presets and paths. To use it:
  bash   echo 'source <(petatron completion bash)' >> ~/.bashrc
  zsh    echo 'source <(petatron completion zsh)' >> ~/.zshrc
  fish   petatron completion fish > ~/.config/fish/completions/petatron.fish"""

FlagValue = Literal["none", "text", "path"] | tuple[str, ...]
"""What follows a flag: nothing, text that nobody can guess, a path, or one of some words."""


@dataclass(frozen=True, slots=True)
class ShellCompletion:
    """What may follow a command: other commands, flags with their values, presets."""

    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    following: tuple[str, ...] = ()
    presets: bool = False


def main(argv: Sequence[str]) -> int:
    if list(argv) in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        print(_USAGE, file=sys.stderr)
        return 2
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[argv[0]](), end="")
    return 0


def completions() -> dict[str, ShellCompletion]:
    """Maps commands, as `train` or `data preprocess`, to what may follow them."""
    from petatron.cli.main import SUBCOMMANDS, import_subcommand

    run = run_flags()
    commands = {
        "train": ShellCompletion(run, presets=True),
        "posttrain": ShellCompletion(run, following=tuple(posttrain.ALGORITHMS)),
        "completion": ShellCompletion(following=SHELLS),
        "lm-eval": ShellCompletion(following=lm_eval_starter.COMMANDS),
        "config": ShellCompletion(following=("show", "diff", "presets", "reference")),
        "config show": ShellCompletion({**run, "--changed": "none", "--yaml": "none"}, presets=True),
        "config diff": ShellCompletion(presets=True),
        "config presets": ShellCompletion(),
        "config reference": ShellCompletion({"--out": "path"}),
        "bench": ShellCompletion(following=tuple(bench.BENCHES)),
    }
    for subcommand in [name for name in SUBCOMMANDS if name not in commands]:
        commands |= dict(_parser_completions(subcommand, import_subcommand(subcommand).parser()))
    commands |= dict(_parser_completions("runs diff", runs.diff_parser()))
    commands["runs"] = replace(commands["runs"], following=("diff",))
    for subcommand in ("serve", "verify", "eval", "generate", "chat"):
        # What they do not know is a flag of `petatron train`.
        commands[subcommand] = ShellCompletion({**run, **commands[subcommand].flags}, presets=subcommand == "verify")
    sizes: dict[str, FlagValue] = {"--device-memory-gb": "text", "--host-memory-gb": "text"}
    commands["plan memory"] = ShellCompletion({**run, **sizes}, presets=True)
    commands["plan cache"] = ShellCompletion(run, presets=True)
    return commands


def run_flags() -> dict[str, FlagValue]:
    """Returns every flag of `petatron train` with what follows it."""
    flags: dict[str, FlagValue] = dict.fromkeys(known_flags(), "none")
    flags |= {info.flag: _field_value(info) for info in fields_by_name().values()}
    flags |= {flag: _field_value(fields_by_name()[name]) for flag, name in megatron_flags.ALIASES.items()}
    flags |= {flag: tuple(choices) for flag, choices in megatron_flags.CHOICE_FLAGS.items()}
    flags |= {flag: "text" for flag, answer in megatron_table().items() if answer.takes_value and flag in flags}
    return flags | {PRESET_FLAG: preset_names(), FILE_FLAG: "path", "--help": "none"}


def _field_value(info: FieldInfo) -> FlagValue:
    if info.choices:
        return info.choices
    return "none" if info.kind == "bool" else "path" if "path" in info.marks else "text"


def _parser_completions(command: str, parser: argparse.ArgumentParser) -> Iterable[tuple[str, ShellCompletion]]:
    flags: dict[str, FlagValue] = {}
    inner_names: tuple[str, ...] = ()
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            inner_names = tuple(action.choices)
            for name, inner in action.choices.items():
                yield from _parser_completions(f"{command} {name}", inner)
        elif action.help != argparse.SUPPRESS:
            flags |= {flag: _action_value(action) for flag in action.option_strings if flag.startswith("--")}
    yield command, ShellCompletion(flags, inner_names)


_PATH_NAMES = ("FILE", "PATH", "PREFIX", "DIR", "KEY", "FOLDER")


def _action_value(action: argparse.Action) -> FlagValue:
    if action.nargs == 0:
        return "none"
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    named = action.metavar if isinstance(action.metavar, str) else ""
    return "path" if any(word in named for word in _PATH_NAMES) else "text"


def bash_script() -> str:
    """Returns the script for bash: a table of words for each command, and one for the value of each flag."""
    from petatron.cli.main import SUBCOMMANDS

    commands = completions()
    cases = "\n".join(_bash_case(command, completion) for command, completion in commands.items())
    values = "\n".join(_bash_value(flag, value) for flag, value in sorted(_all_values(commands).items()))
    return f"""# petatron completion for bash; made by `petatron completion bash`
_petatron() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" subcommand="${{COMP_WORDS[1]}}"
  local words="" flags="" presets="" IFS=$' \\t\\n'
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=( $(compgen -W {shlex.quote(" ".join(SUBCOMMANDS))} -- "$cur") )
    return
  fi
  local command="$subcommand"
  [[ $COMP_CWORD -gt 2 ]] && command="$subcommand ${{COMP_WORDS[2]}}"
  case "$command" in
{cases}
  esac
  case "$prev" in
{values}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=( $(compgen -W "$flags" -- "$cur") )
  elif [[ -n $words ]]; then
    COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  else
    [[ -n $presets ]] && COMPREPLY=( $(compgen -W {shlex.quote(" ".join(preset_names()))} -- "$cur") )
    COMPREPLY+=( $(compgen -f -- "$cur") )
  fi
}}
complete -o filenames -F _petatron petatron
"""


def _bash_case(command: str, completion: ShellCompletion) -> str:
    # `train --tp 2`: the second word is no subcommand, so a subcommand without any matches with whatever follows.
    pattern = f'"{command}"' if completion.following or " " in command else f'"{command}" | "{command} "*'
    return (
        f"    {pattern}) words={shlex.quote(' '.join(completion.following))}; flags={shlex.quote(' '.join(completion.flags))}; "
        f"presets={'yes' if completion.presets else ''} ;;"
    )


def _bash_value(flag: str, value: FlagValue) -> str:
    choices = "" if isinstance(value, str) else " ".join(value)
    kind = "-f" if value == "path" else f"-W {shlex.quote(choices)}"
    return f'    {flag}) COMPREPLY=( $(compgen {kind} -- "$cur") ); return ;;'


def _all_values(commands: Mapping[str, ShellCompletion]) -> dict[str, FlagValue]:
    """Returns the values of flags that have any; where subcommands differ, a path wins."""
    values: dict[str, FlagValue] = {}
    for completion in commands.values():
        for flag, value in completion.flags.items():
            if value != "none" and values.get(flag) != "path":
                values[flag] = value
    return values


def zsh_script() -> str:
    """Returns bash's script, run by zsh's own compatibility layer."""
    start = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    return f"# petatron completion for zsh; made by `petatron completion zsh`\n{start}{bash_script()}"


def fish_script() -> str:
    """Returns the script for fish: one line for each subcommand and flag."""
    from petatron.cli.main import SUBCOMMANDS

    lines = ["# petatron completion for fish; made by `petatron completion fish`", "complete -c petatron -e"]
    lines += [
        f"complete -c petatron -n __fish_use_subcommand -f -a {subcommand} -d {shlex.quote(summary)}"
        for subcommand, summary in SUBCOMMANDS.items()
    ]
    for command, completion in completions().items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        if completion.following:
            names = " ".join(completion.following)
            first = f"{seen}; and not __fish_seen_subcommand_from {names}"
            lines.append(f'complete -c petatron -n "{first}" -f -a "{names}"')
        if completion.presets:
            lines.append(f'complete -c petatron -n "{seen}" -a "{" ".join(preset_names())}"')
        for flag, value in completion.flags.items():
            kinds = {"none": "-f", "path": "-r -F", "text": "-x"}
            rest = kinds[value] if isinstance(value, str) else f'-x -a "{" ".join(value)}"'
            lines.append(f'complete -c petatron -n "{seen}" -l {flag[2:]} {rest}')
    return "\n".join(lines) + "\n"
