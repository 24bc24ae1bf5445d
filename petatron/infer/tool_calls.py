"""Parses tool calls in what a model writes: the common formats, found in a text that grows, and grammars that force them.

    hermes   <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>, any number, with text before and between (Hermes, Qwen)
    llama3   {"name": "look", "parameters": {"at": "x"}} as the whole answer, perhaps after <|python_tag|>, several parted by ;
    mistral  [TOOL_CALLS] [{"name": "look", "arguments": {"at": "x"}}], at the end of the answer

What looks like a call and cannot be read stays text. A call is reported when it is complete.

Under a grammar an answer must call tools (`required`), or each call that it makes is one of the tools with fitting arguments. The text
around the arguments is what chat templates show the model, so that a constrained call looks like one of its training. Arguments are JSON
of the function's `parameters`, each schema a document of its own: references inside stay what they are. A marker that is a special token
of the vocabulary is named by its id, for its characters written out are other tokens, which the model has never seen there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from petatron.infer.text_stream import num_held

_SPACED_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` and the tojson of templates write it."""
_ANY_TEXT = r"/(.|\n)*/"
_PLAIN_TEXT = r"/([^{\s](.|\n)*)?/"
"""In the llama3 format an answer that begins with { is a call."""
ToolCallFormat = Literal["hermes", "llama3", "mistral"]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)
_BEGIN: Mapping[ToolCallFormat, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_HERMES_END = "</tool_call>"
TOOL_MARKERS = (*_BEGIN.values(), _HERMES_END)


class ToolCall(NamedTuple):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class AnswerParts(NamedTuple):
    """What new text of an answer brought: some of its reasoning and of its content, and calls that are complete."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def template_format(template: str) -> ToolCallFormat | None:
    """Returns the format that a chat template shows the model; None if it shows none of these.

    >>> template_format("{% if tools %}<tool_call>...{% endif %}"), template_format("{{ messages }}")
    ('hermes', None)
    """
    if _BEGIN["hermes"] in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if "<|python_tag|>" in template or '"parameters": dictionary' in template else None


@dataclass(slots=True)
class ToolCallParser:
    """Reads one answer. names: of the tools that were offered; a llama3 answer that names no other is a call, any other JSON is text.

    >>> parser = ToolCallParser("hermes", {"look"})
    >>> parser.feed("Let me. <tool"), parser.feed('_call>{"name": "look", "arguments": {}}</tool_call>').calls
    (AnswerParts(reasoning='', content='Let me. ', calls=()), (ToolCall(name='look', arguments='{}'),))
    """

    form: ToolCallFormat
    names: Collection[str]
    num_calls: int = field(default=0, init=False)
    _pending: str = field(default="", init=False)
    _inside: bool = field(default=False, init=False)
    _plain: bool = field(default=False, init=False)

    def feed(self, text: str) -> AnswerParts:
        self._pending += text
        content, calls = "", []
        while True:
            if not self._inside:
                content += self._take_content()
            if not self._inside or self.form != "hermes" or _HERMES_END not in self._pending:
                return self._delta(content, calls)
            body, self._pending = self._pending.split(_HERMES_END, 1)
            new_calls = self._read(body)
            content += f"{_BEGIN['hermes']}{body}{_HERMES_END}" if new_calls is None else ""
            calls += new_calls or []
            self._inside = False

    def finish(self) -> AnswerParts:
        """Takes the end of the answer: a call without its end is one, if it can be read."""
        rest, self._pending = self._pending, ""
        if not self._inside:
            return self._delta(rest, [])
        begin = _BEGIN[self.form] if self.form != "llama3" else ""
        calls = self._read(rest)
        return self._delta(f"{begin}{rest}" if calls is None else "", calls or [])

    def _delta(self, content: str, calls: list[ToolCall]) -> AnswerParts:
        self.num_calls += len(calls)
        # Line breaks between calls are no text of the answer.
        return AnswerParts("", "" if self.num_calls and not content.strip() else content, tuple(calls))

    def _take_content(self) -> str:
        """Returns what is certainly no call, and notes whether one begins."""
        if self.form == "llama3":
            return self._take_llama3_content()
        before, begin, after = self._pending.partition(_BEGIN[self.form])
        if begin:
            self._pending, self._inside = after, True
            return before
        certain = len(before) - num_held(before, _BEGIN[self.form])
        self._pending = before[certain:]
        return before[:certain]

    def _take_llama3_content(self) -> str:
        """A call is the whole answer, so its first character tells."""
        start = self._pending.lstrip()
        if not self._plain and start.startswith(("{", _BEGIN["llama3"])):
            self._inside = True
            return ""
        if not self._plain and _BEGIN["llama3"].startswith(start):
            return ""
        content, self._pending, self._plain = self._pending, "", True
        return content

    def _read(self, body: str) -> list[ToolCall] | None:
        """Returns the calls of a text; None if it is something else."""
        values = _read_values(body.strip().removeprefix(_BEGIN["llama3"]))
        calls = [call for value in values or [] if (call := _read_call(value)) is not None]
        if not calls or values is None or len(calls) != len(values):
            return None
        return None if self.form == "llama3" and any(call.name not in self.names for call in calls) else calls


def _read_values(text: str) -> list[Any] | None:
    """Returns the JSON values of a text, one after the other or in a list."""
    values: list[Any] = []
    decoder = json.JSONDecoder()
    try:
        while text := text.lstrip(" \n\r\t;"):
            value, end = decoder.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:]
    except (ValueError, RecursionError):
        return None
    return values


def _read_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    return ToolCall(name, json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def tool_grammar(
    form: ToolCallFormat,
    tools: Mapping[str, Mapping[str, Any] | None],
    *,
    required: bool,
    parallel: bool = True,
    marker_ids: Mapping[str, int] | None = None,
) -> str:
    """Returns the grammar, in Lark's notation. required: the answer is calls; else it may be text as well.

    tools: the JSON schema of the arguments by a function's name; None: any object. marker_ids: of markers that are tokens of their own.

    >>> print(tool_grammar("llama3", {"look": None}, required=True, parallel=False).splitlines()[0])
    start: call
    """
    key = "parameters" if form == "llama3" else "arguments"
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, (name, parameters) in enumerate(tools.items()):
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        rules.append(f"call_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}')}")
        schema = {"type": "object"} if parameters is None else parameters
        rules.append(f"arguments_{number}: %json {json.dumps({'x-guidance': _SPACED_JSON, **schema})}")
    return "\n".join([*_start(form, marker_ids or {}, required=required, parallel=parallel), *rules]) + "\n"


def _start(form: ToolCallFormat, marker_ids: Mapping[str, int], *, required: bool, parallel: bool) -> list[str]:
    """Returns the rules above a single call."""
    if form == "llama3":
        calls = 'call (";" " "? call)*' if parallel else "call"
        return [f"start: {calls}"] if required else [f"start: {calls} | TEXT", f"TEXT: {_PLAIN_TEXT}"]
    if form == "mistral":
        items = 'call (", " call)*' if parallel else "call"
        begin, body = _marker(_BEGIN[form], marker_ids), f'" "? "[" {items} "]"'
        many = False
    else:
        begin = _marker(_BEGIN[form], marker_ids)
        body = f'"\\n"? call "\\n"? {_marker(_HERMES_END, marker_ids)}'
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
