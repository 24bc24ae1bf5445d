"""`ToolEnvironment`: runs the functions that a model calls, and tells it what they returned, until it answers without a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from petatron.infer.split_answer_parts import AnswerSplitter, ReasoningParser
from petatron.infer.tool_calls import ToolCall, ToolCallFormat, ToolCallParser
from petatron.posttrain.environments.environment import Observation, TurnResult
from petatron.posttrain.environments.tool_schema import tool_schema

_ID_CHARS = 9
"""Mistral's templates take no other length."""


def tools_of_module(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Returns the tools of a file by name: those in its list TOOLS, else its functions whose names have no underscore before them."""
    given = getattr(module, "TOOLS", None)
    functions = (
        list(given)
        if given is not None
        else [
            value
            for name, value in vars(module).items()
            if callable(value)
            and not isinstance(value, type)
            and not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
    )
    if not functions:
        raise ValueError(f"{module.__file__} has no functions")
    return {function.__name__: function for function in functions}


class ToolEnvironment:
    """One episode. A tool that raises tells the model so: it may call again, and better.

    >>> def add(a: int, b: int) -> int:
    ...     return a + b
    >>> tools = ToolEnvironment({"add": add}, "hermes")
    >>> tools.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>').observation
    [{'role': 'tool', 'name': 'add', 'tool_call_id': '000000000', 'content': '3'}]
    >>> tools.step("It is 3."), tools.tools[0]["function"]["parameters"]["required"]
    (TurnResult(observation=None, reward=0.0, done=True), ['a', 'b'])
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]], form: str) -> None:
        self._functions = tools
        self._form: ToolCallFormat = form  # type: ignore[assignment]
        self.tools = [tool_schema(function) for function in tools.values()]

    def reset(self, record: Mapping[str, Any]) -> Observation | None:
        return None

    def step(self, answer: str) -> TurnResult:
        # A template may have written the tag that begins reasoning.
        inside = "</think>" in answer and "<think>" not in answer
        splitter = AnswerSplitter(
            ReasoningParser("think", inside=inside), ToolCallParser(self._form, self._functions.keys())
        )
        calls = splitter.feed(answer, final=True).calls
        if not calls:
            return TurnResult(None, done=True)
        return TurnResult([self._result(number, call) for number, call in enumerate(calls)])

    def _result(self, number: int, call: ToolCall) -> dict[str, Any]:
        identity = f"{number:0{_ID_CHARS}d}"
        return {"role": "tool", "name": call.name, "tool_call_id": identity, "content": self._call(call)}

    def _call(self, call: ToolCall) -> str:
        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name}. Tools: {', '.join(self._functions)}"
        try:
            value = function(**json.loads(call.arguments))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"
