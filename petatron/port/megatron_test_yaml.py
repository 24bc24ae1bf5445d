"""Megatron's functional-test files: flags as a YAML mapping (MODEL_ARGS), with the environment of the run (ENV_VARS)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from petatron.base.errors import DataError
from petatron.config.flags.megatron_flags import ALIASES
from petatron.config.flags.megatron_table import megatron_flags
from petatron.config.schema.fields import fields_by_name
from petatron.config.yaml_limits import limited_loader
from petatron.port.find_launch_command import TrainingLaunch
from petatron.port.port_flags import spelled
from petatron.port.shell_interpreter import ScriptNote
from petatron.port.shell_lexer import word_of
from petatron.port.shell_values import ShellText, ShellVariables

_FLAGS_KEY, _VARIABLES_KEY = "MODEL_ARGS", "ENV_VARS"
_INFERENCE = "gpt_dynamic_inference.py"
_PROMPT_FLAGS = ("--prompts", "--prompt-file", "--num-tokens-to-generate")
_BRACKETS = re.compile(r"\[([^\]]+)\]", re.S)
_ESCAPED = re.compile(r"\\(.)")
_MERGE_TAG, _NULL_TAG = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:null"
_MODES_KEYS = ("MODES", "MODE", "TEST_TYPE", "TRAINING_SCRIPT_PATH")


def read_functional_test(
    text: str, given: Mapping[str, str]
) -> tuple[TrainingLaunch, ShellVariables, list[ScriptNote]]:
    """Returns the run of a functional-test file; its world size is not in it."""
    root, merged = _composed(text)
    keys = {key.value: node for key, node in _entries(root)}
    model = keys.get(_FLAGS_KEY)
    if model is None or model.id != "mapping":
        raise DataError(
            f"it has no {_FLAGS_KEY} with flags, as Megatron's functional tests do. `petatron config show FILE` reads files of ours."
        )
    variables = ShellVariables(given)
    environment = keys.get(_VARIABLES_KEY)
    for key, node in _entries(environment):
        line = key.start_mark.line + 1
        value = variables.expand_text(word_of(node.value if node.id == "scalar" else "", line))
        variables.assign(key.value, [value], line=line, appends=False, is_array=False)
    flags = [flag for key, node in _entries(model) for flag in _flag(key, node, variables)]
    modes = {name: _plain(keys[name]) for name in _MODES_KEYS if name in keys}
    notes = [
        _other_key_note(name, node)
        for name, node in keys.items()
        if name not in (_FLAGS_KEY, _VARIABLES_KEY, *_MODES_KEYS) and id(node) not in merged
    ]
    notes += [note for key, node in _entries(model) for note in _value_notes(key, node)]
    notes += [ScriptNote(keys[name].start_mark.line + 1, f"{name} is {value}") for name, value in modes.items()]
    answers = "inference" in " ".join(modes.values()) or any(spelled(flag.text) in _PROMPT_FLAGS for flag in flags)
    script = modes.get("TRAINING_SCRIPT_PATH", _INFERENCE if answers else "pretrain_gpt.py")
    return TrainingLaunch(model.start_mark.line, "torchrun", script, tuple(flags)), variables, notes


def _composed(text: str) -> tuple[Any, set[int]]:
    """Returns the document, with merge keys (`<<: *BASE`) replaced by what they stand for, and the identities of the mappings merged."""
    import yaml

    loader = limited_loader()(text)
    merged: set[int] = set()
    try:
        root: Any = loader.get_single_node()
        nodes = [root] if root is not None and root.id == "mapping" else []
        nodes += [node for _, node in nodes[0].value if node.id == "mapping"] if nodes else []
        for node in nodes:
            _merge(node, loader, merged)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise DataError(
            f"{where}it is not valid YAML: {getattr(error, 'problem', None) or 'it cannot be parsed'}"
        ) from error
    finally:
        loader.dispose()
    return root, merged


def _merge(mapping: Any, loader: Any, merged: set[int]) -> None:
    """Puts the entries of merged mappings before a mapping's own, without those that it has itself."""
    sources = [node for key, node in mapping.value if key.tag == _MERGE_TAG]
    if not sources:
        return
    sources = [node for source in sources for node in (source.value if source.id == "sequence" else [source])]
    merged.update(map(id, sources))
    direct = [(key, node) for key, node in mapping.value if key.tag != _MERGE_TAG]
    loader.flatten_mapping(mapping)
    names = {key.value for key, _ in direct if key.id == "scalar"}
    inherited = {
        key.value: (key, node) for key, node in mapping.value[: len(mapping.value) - len(direct)] if key.id == "scalar"
    }
    mapping.value = [*(entry for name, entry in inherited.items() if name not in names), *direct]


def _entries(mapping: Any) -> list[tuple[Any, Any]]:
    """Returns the pairs of a mapping; none of what is no mapping."""
    entries = mapping.value if mapping is not None and mapping.id == "mapping" else []
    for key, _ in entries:
        if key.id != "scalar":
            raise DataError(f"line {key.start_mark.line + 1}: a {key.id} is a key, where a name is expected")
    return entries


def _value_notes(key: Any, node: Any) -> Iterator[ScriptNote]:
    line = key.start_mark.line + 1
    if node.tag == _NULL_TAG and not _is_word_null(key, node):
        yield ScriptNote(
            line, f"{key.value} is null: it counts as the flag alone; Megatron's runner writes the word null behind it"
        )
    elif _is_empty_text(node):
        yield ScriptNote(line, f"{key.value} is an empty text, and left out: Megatron's runner leaves it out too")


def _is_empty_text(node: Any) -> bool:
    return node.id == "scalar" and node.style is not None and node.value == ""


def _other_key_note(name: str, node: Any) -> ScriptNote:
    what = "flags of a second run are not ported" if name.startswith(_FLAGS_KEY) else "is not a setting of the run"
    return ScriptNote(node.start_mark.line + 1, f"{name}: {what}")


def _flag(key: Any, node: Any, variables: ShellVariables) -> list[ShellText]:
    """Returns a flag with its values, split as Megatron's runner does: `true` is a flag alone, brackets hold several values, an empty
    text leaves the flag out, and everything is unquoted twice. Blanks without brackets separate the values of a flag that takes several.
    """
    line = key.start_mark.line + 1
    flag = ShellText(str(key.value), line)
    if node.id == "mapping":
        raise DataError(f"line {line}: {key.value} has a mapping, where a value is expected")
    if node.id == "sequence":
        for item in node.value:
            if item.id != "scalar" or item.tag == _NULL_TAG:
                what = "null" if item.id == "scalar" else f"a {item.id}"
                raise DataError(f"line {line}: {key.value} has {what} in its list, where a value is expected")
        return [flag, *(variables.expand_text(word_of(str(item.value), line)) for item in node.value)]
    if _is_empty_text(node):
        return []
    if _is_word_null(key, node):
        return [flag, ShellText(node.value, line)]
    if node.tag == _NULL_TAG or node.value == "true" or (node.value.lower() == "true" and node.style is None):
        return [flag]
    text = _unquoted(node.value)
    inner = _BRACKETS.fullmatch(text)
    value = variables.expand_text(word_of(inner[1] if inner else text, line))
    if not any(char.isspace() for char in value.text):
        return [flag, value if value.missing else replace(value, text=_ESCAPED.sub(r"\1", value.text))]
    if value.missing or not (inner or _takes_several(str(key.value))):
        return [flag, value]
    return [flag, *(ShellText(piece, line) for piece in value.text.split())]


def _is_word_null(key: Any, node: Any) -> bool:
    """Whether a null is the value of that name, which the flag has: Megatron's runner writes it as a word."""
    flag = megatron_flags().get(spelled(str(key.value)))
    return node.tag == _NULL_TAG and node.value == "null" and flag is not None and "null" in flag.neutral_values


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
