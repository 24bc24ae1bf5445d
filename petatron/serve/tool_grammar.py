"""Grammars under which an answer calls tools: it must (`required`), or each call that it makes is one of the tools with fitting arguments.

The text around the arguments is what chat templates show the model, so that a constrained call looks like one of its training. Arguments
are JSON of the function's `parameters`, each schema a document of its own: references inside stay what they are. A marker that is a
special token of the vocabulary is named by its id, for its characters written out are other tokens, which the model has never seen there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.serve.tool_calls import ToolCallFormat

_SPACED_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` and the tojson of templates write it."""
_ANY_TEXT = r"/(.|\n)*/"
_PLAIN_TEXT = r"/([^{\s](.|\n)*)?/"
"""In the llama3 format an answer that begins with { is a call."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function that may be called. parameters: JSON schema of its arguments; None: any object."""

    name: str
    parameters: Mapping[str, Any] | None = None


def tool_grammar(
    form: ToolCallFormat,
    tools: Sequence[CallableTool],
    *,
    required: bool,
    parallel: bool = True,
    marker_ids: Mapping[str, int] | None = None,
) -> str:
    """Returns the grammar, in Lark's notation. required: the answer is calls; else it may be text as well.

    marker_ids: of markers that are tokens of their own.

    >>> print(tool_grammar("llama3", [CallableTool("look")], required=True, parallel=False).splitlines()[0])
    start: call
    """
    key = "parameters" if form == "llama3" else "arguments"
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        rules.append(f"call_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}')}")
        schema = {"type": "object"} if tool.parameters is None else tool.parameters
        rules.append(f"arguments_{number}: %json {json.dumps({'x-guidance': _SPACED_JSON, **schema})}")
    return "\n".join([*_start(form, marker_ids or {}, required=required, parallel=parallel), *rules]) + "\n"


def _start(form: ToolCallFormat, marker_ids: Mapping[str, int], *, required: bool, parallel: bool) -> list[str]:
    """Returns the rules above a single call."""
    if form == "llama3":
        calls = 'call (";" " "? call)*' if parallel else "call"
        return [f"start: {calls}"] if required else [f"start: {calls} | TEXT", f"TEXT: {_PLAIN_TEXT}"]
    if form == "mistral":
        items = 'call (", " call)*' if parallel else "call"
        begin, body = _marker("[TOOL_CALLS]", marker_ids), f'" "? "[" {items} "]"'
        many = False
    else:
        begin = _marker("<tool_call>", marker_ids)
        body = f'"\\n"? call "\\n"? {_marker("</tool_call>", marker_ids)}'
        many = parallel
    if required:
        more = f' ("\\n"? {begin} {body})*' if many else ""
        return [f"start: {begin} {body}{more}"]
    # Mistral's calls are the end of an answer; text may follow the others.
    start = "tag | TEXT" if form == "mistral" else "tag* TEXT" if many else "tag? TEXT"
    rules = [f"start: {start}", f"TEXT: {_ANY_TEXT}"]
    if begin.startswith("<["):
        return [*rules, f"tag: TEXT {begin} {body}"]
    # A lazy lexeme ends with the first marker: the text before has none.
    return [*rules, f"text_and_marker[lazy]: TEXT {begin}", f"tag: text_and_marker {body}"]


def _marker(text: str, marker_ids: Mapping[str, int]) -> str:
    """Returns a marker as grammars write it: a special token by its id, any other text as it is."""
    return f"<[{marker_ids[text]}]>" if text in marker_ids else json.dumps(text)
