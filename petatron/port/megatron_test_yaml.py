"""Megatron's functional-test files: flags as a YAML mapping (MODEL_ARGS), with the environment of the run (ENV_VARS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petatron.base.errors import DataError
from petatron.config.yaml_limits import limited_loader
from petatron.port.launch_command import TrainingLaunch
from petatron.port.shell_interpreter import ScriptNote
from petatron.port.shell_lexer import word_of
from petatron.port.shell_values import ShellText, ShellVariables

_FLAGS_KEY, _VARIABLES_KEY = "MODEL_ARGS", "ENV_VARS"
_INFERENCE = "gpt_dynamic_inference.py"
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
    script = modes.get(
        "TRAINING_SCRIPT_PATH", _INFERENCE if "inference" in " ".join(modes.values()) else "pretrain_gpt.py"
    )
    return TrainingLaunch(model.start_mark.line, "torchrun", script, tuple(flags)), variables, notes


def _other_key_note(name: str, node: Any) -> ScriptNote:
    what = "flags of a second run are not ported" if name.startswith(_FLAGS_KEY) else "is not a setting of the run"
    return ScriptNote(node.start_mark.line + 1, f"{name}: {what}")


def _flag(key: Any, node: Any, variables: ShellVariables) -> list[ShellText]:
    """Returns a flag with its values: `true` is a flag alone, and blanks separate values, as in the command that the test runs."""
    line = key.start_mark.line + 1
    flag = ShellText(str(key.value), line)
    if node.id == "mapping":
        raise DataError(f"line {line}: {key.value} has a mapping, where a value is expected")
    if node.id == "sequence":
        return [flag, *(variables.expand_text(word_of(str(item.value), line)) for item in node.value)]
    if node.value.lower() in ("true", "") and node.style is None:
        return [flag]
    value = variables.expand_text(word_of(_without_brackets(node.value.strip("\"'")), line))
    if value.missing or not any(char.isspace() for char in value.text):
        return [flag, value]
    return [flag, *(ShellText(piece, line) for piece in value.text.split())]


def _without_brackets(value: str) -> str:
    """The test's command has the words of `"[module name]"`, without brackets; a list of numbers keeps them, where `*` may follow."""
    names = value.removeprefix("[").removesuffix("]").split()
    return " ".join(names) if value == f"[{' '.join(names)}]" and len(names) > 1 and "," not in value else value


def _plain(node: Any) -> str:
    if node.id == "sequence":
        return ", ".join(str(item.value) for item in node.value)
    return str(node.value) if node.id == "scalar" else "a mapping"
