"""Calls of tools in what a model writes: the common formats, found in a text that grows.

    hermes   <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>, any number, with text before and between (Hermes, Qwen)
    llama3   {"name": "look", "parameters": {"at": "x"}} as the whole answer, perhaps after <|python_tag|>, several parted by ;
    mistral  [TOOL_CALLS] [{"name": "look", "arguments": {"at": "x"}}], at the end of the answer

What looks like a call and cannot be read stays text. A call is reported when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from petatron.serve.reasoning import num_held

ToolCallFormat = Literal["hermes", "llama3", "mistral"]
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = get_args(ToolCallFormat)
_BEGIN: Mapping[ToolCallFormat, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_HERMES_END = "</tool_call>"
TOOL_MARKERS = (*_BEGIN.values(), _HERMES_END)


class ToolCall(NamedTuple):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolDelta(NamedTuple):
    """What new text brought: some that is no call, and calls that are complete."""

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
    (ToolDelta(content='Let me. ', calls=()), (ToolCall(name='look', arguments='{}'),))
    """

    form: ToolCallFormat
    names: Collection[str]
    num_calls: int = field(default=0, init=False)
    _pending: str = field(default="", init=False)
    _inside: bool = field(default=False, init=False)
    _plain: bool = field(default=False, init=False)

    def feed(self, text: str) -> ToolDelta:
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

    def finish(self) -> ToolDelta:
        """Takes the end of the answer: a call without its end is one, if it can be read."""
        rest, self._pending = self._pending, ""
        if not self._inside:
            return self._delta(rest, [])
        begin = _BEGIN[self.form] if self.form != "llama3" else ""
        calls = self._read(rest)
        return self._delta(f"{begin}{rest}" if calls is None else "", calls or [])

    def _delta(self, content: str, calls: list[ToolCall]) -> ToolDelta:
        self.num_calls += len(calls)
        # Line breaks between calls are no text of the answer.
        return ToolDelta("" if self.num_calls and not content.strip() else content, tuple(calls))

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
