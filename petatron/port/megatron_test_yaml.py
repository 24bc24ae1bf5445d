"""Megatron's functional-test files: flags as a YAML mapping (MODEL_ARGS), with the environment of the run (ENV_VARS)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petatron.base.errors import DataError
from petatron.config.flags.megatron_flags import ALIASES
from petatron.config.schema.fields import fields_by_name
from petatron.config.yaml_limits import limited_loader
from petatron.port.launch_command import TrainingLaunch
from petatron.port.port_flags import spelled
from petatron.port.shell_interpreter import ScriptNote
from petatron.port.shell_lexer import word_of
from petatron.port.shell_values import ShellText, ShellVariables

_FLAGS_KEY, _VARIABLES_KEY = "MODEL_ARGS", "ENV_VARS"
_INFERENCE = "gpt_dynamic_inference.py"
_PROMPT_FLAGS = ("--prompts", "--prompt-file", "--num-tokens-to-generate")
_BRACKETS = re.compile(r"\[([^\]]+)\]", re.S)
_ESCAPED = re.compile(r"\\(.)")
_MODES_KEYS = ("MODES", "MODE", "TEST_TYPE", "TRAINING_SCRIPT_PATH")


def read_functional_test(
    text: str, given: Mapping[str, str]
) -> tuple[TrainingLaunch, ShellVariables, list[ScriptNote]]:
    """Returns the run of a functional-test file; its world size is not in it."""
    import yaml

    try:
        root: Any = yaml.compose(text, Loader=limited_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise DataError(
            f"{where}it is not valid YAML: {getattr(error, 'problem', None) or 'it cannot be parsed'}"
        ) from error
    keys = {key.value: node for key, node in root.value} if root is not None and root.id == "mapping" else {}
    model = keys.get(_FLAGS_KEY)
    if model is None or model.id != "mapping":
        raise DataError(
            f"it has no {_FLAGS_KEY} with flags, as Megatron's functional tests do. `petatron config show FILE` reads files of ours."
        )
    variables = ShellVariables(given)
    environment = keys.get(_VARIABLES_KEY)
    for key, node in environment.value if environment is not None and environment.id == "mapping" else ():
        line = key.start_mark.line + 1
        value = variables.expand_text(word_of(node.value if node.id == "scalar" else "", line))
        variables.assign(key.value, [value], line=line, appends=False, is_array=False)
    flags = [flag for key, node in model.value for flag in _flag(key, node, variables)]
    modes = {name: _plain(keys[name]) for name in _MODES_KEYS if name in keys}
    notes = [
        _other_key_note(name, node)
        for name, node in keys.items()
        if name not in (_FLAGS_KEY, _VARIABLES_KEY, *_MODES_KEYS)
    ]
    notes += [ScriptNote(keys[name].start_mark.line + 1, f"{name} is {value}") for name, value in modes.items()]
    answers = "inference" in " ".join(modes.values()) or any(spelled(flag.text) in _PROMPT_FLAGS for flag in flags)
    script = modes.get("TRAINING_SCRIPT_PATH", _INFERENCE if answers else "pretrain_gpt.py")
    return TrainingLaunch(model.start_mark.line, "torchrun", script, tuple(flags)), variables, notes


def _other_key_note(name: str, node: Any) -> ScriptNote:
    what = "flags of a second run are not ported" if name.startswith(_FLAGS_KEY) else "is not a setting of the run"
    return ScriptNote(node.start_mark.line + 1, f"{name}: {what}")


def _flag(key: Any, node: Any, variables: ShellVariables) -> list[ShellText]:
    """Returns a flag with its values, split as Megatron's runner does: `true` is a flag alone, brackets hold several values,
    and everything is unquoted twice. Blanks without brackets separate the values of a flag that takes several."""
    line = key.start_mark.line + 1
    flag = ShellText(str(key.value), line)
    if node.id == "mapping":
        raise DataError(f"line {line}: {key.value} has a mapping, where a value is expected")
    if node.id == "sequence":
        return [flag, *(variables.expand_text(word_of(str(item.value), line)) for item in node.value)]
    if node.value.lower() in ("true", "") and node.style is None:
        return [flag]
    text = _unquoted(node.value)
    inner = _BRACKETS.fullmatch(text)
    value = variables.expand_text(word_of(inner[1] if inner else text, line))
    if not any(char.isspace() for char in value.text):
        return [flag, value if value.missing else replace(value, text=_ESCAPED.sub(r"\1", value.text))]
    if value.missing or not (inner or _takes_several(str(key.value))):
        return [flag, value]
    return [flag, *(ShellText(piece, line) for piece in value.text.split())]


def _unquoted(text: str) -> str:
    """Returns a text without one level of quotes and backslashes; as it is if they do not match."""
    try:
        return " ".join(shlex.split(text))
    except ValueError:
        return text.strip("\"'")


def _takes_several(flag: str) -> bool:
    name = spelled(flag)
    info = fields_by_name().get(ALIASES.get(name, name[2:].replace("-", "_")))
    return info is not None and info.is_list


def _plain(node: Any) -> str:
    if node.id == "sequence":
        return ", ".join(str(item.value) for item in node.value)
    return str(node.value) if node.id == "scalar" else "a mapping"
