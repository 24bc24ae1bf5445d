"""The JSON schema of a Python function, as chat templates show it to a model: from its type hints and its docstring.

def weather(city: str, days: int = 1) -> str:
    \"\"\"Returns the weather.

    Args:
        city: Its name.
        days: How many days ahead.
    \"\"\"
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Examples?):\s*$")
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function; raises `ValueError` where an argument has no type that JSON knows.

    >>> def look(city: str, days: int = 1) -> str:
    ...     '''Returns the weather.
    ...
    ...     Args:
    ...         city: Its name.
    ...     '''
    >>> schema = tool_schema(look)["function"]
    >>> schema["description"], schema["parameters"]["properties"]["city"], schema["parameters"]["required"]
    ('Returns the weather.', {'type': 'string', 'description': 'Its name.'}, ['city'])
    """
    hints = typing.get_type_hints(function)
    description, of_arguments = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{function.__name__} takes {parameter}, which no call by names has")
        if name not in hints:
            raise ValueError(f"{function.__name__} has no type for {name}: write {name}: str, for instance")
        text = of_arguments.get(name)
        properties[name] = _schema_of(hints[name], f"{name} of {function.__name__}") | (
            {"description": text} if text else {}
        )
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    named = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": named}


def _schema_of(hint: Any, owner: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal:
        kinds = {_TYPES.get(type(value), "") for value in arguments}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        parts = [_schema_of(part, owner) for part in arguments if part is not type(None)]
        schema = parts[0] if len(parts) == 1 else {"anyOf": parts}
        return schema | ({"nullable": True} if type(None) in arguments else {})
    if hint in (list, tuple) or origin in (list, tuple, Sequence):
        items = [part for part in arguments if part is not Ellipsis]
        return {"type": "array", **({"items": _schema_of(items[0], owner)} if items else {})}
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": _schema_of(arguments[1], owner)} if arguments else {})}
    raise ValueError(
        f"{owner} has the type {hint}, which JSON has not: use str, int, float, bool, list, dict or Literal"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns what is before its sections, and what it says of arguments."""
    description: list[str] = []
    of_arguments: dict[str, str] = {}
    section, name = "", ""
    for line in text.splitlines():
        if title := _SECTION.match(line):
            section, name = title[1], ""
        elif not section:
            description.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters"):
            if argument := _ARGUMENT.match(line):
                name = argument[1]
                of_arguments[name] = argument[2].strip()
            elif name and line.strip():
                of_arguments[name] += f" {line.strip()}"
    return "\n".join(description).strip(), of_arguments
