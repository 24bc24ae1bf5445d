"""The tools of a chat request: which are offered, whether one must be called, and the grammar that holds the answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from petatron.infer.sampling_params import Constraint
from petatron.infer.tool_calls import TOOL_MARKERS, ToolCallFormat, tool_grammar
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import ChatCompletionRequest, ChatTool
from petatron.serve.served_model_properties import ModelCard


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """offered: shown to the model. callable: that it may call. required: it must call one. form: in which; None: answers are text.

    parallel: several at once. legacy: they came as functions, and the answer has a function_call.
    """

    offered: Sequence[ChatTool] = ()
    callable: Sequence[ChatTool] = ()
    required: bool = False
    form: ToolCallFormat | None = None
    parallel: bool = True
    legacy: bool = False

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.offered}

    def constraint(self, model: ModelCard) -> Constraint | None:
        """Returns the grammar of the answer: calls alone, or calls that fit where some tool is strict; None: anything."""
        if self.form is None or not (self.required or any(tool.function.strict for tool in self.callable)):
            return None
        functions = [tool.function for tool in self.callable]
        tools = {
            function.name: function.parameters if self.required or function.strict else None for function in functions
        }
        markers = {name: token for name, token in model.texts.marker_ids.items() if name in TOOL_MARKERS}
        grammar = tool_grammar(self.form, tools, required=self.required, parallel=self.parallel, marker_ids=markers)
        return Constraint(kind="grammar", grammar=grammar)


def choose_tools(body: ChatCompletionRequest, form: ToolCallFormat | None) -> ToolChoice:
    """Reads tools and tool_choice, or functions and function_call. form: that of the served model."""
    legacy = body.functions is not None
    if legacy and body.tools is not None:
        raise ApiError(400, "functions is the older form of tools. Send one of them.", param="functions")
    if body.function_call is not None and not legacy:
        raise ApiError(400, "function_call needs functions. Beside tools it is tool_choice.", param="function_call")
    if legacy and body.tool_choice is not None:
        raise ApiError(400, "tool_choice needs tools. Beside functions it is function_call.", param="tool_choice")
    tools = (
        [ChatTool(type="function", function=function) for function in body.functions or []]
        if legacy
        else body.tools or []
    )
    param, wanted = ("function_call", body.function_call) if legacy else ("tool_choice", body.tool_choice)
    available = [tool.function.name for tool in tools]
    if twice := {name for name in available if available.count(name) > 1}:
        text = f"Two tools have the name {min(twice)!r}."
        raise ApiError(400, text, param="functions" if legacy else "tools")
    mode, names = _read_choice(wanted, param)
    if mode == "none":
        return ToolChoice(legacy=legacy)
    if missing := [name for name in names if name not in available]:
        raise ApiError(400, f"{param} names {missing[0]!r}, which is not among the tools.", param=param)
    if mode == "required" and not tools:
        raise ApiError(400, f"{param} asks for a call, and the request has no tools.", param=param)
    if mode == "required" and form is None:
        text = f"{param} asks for a call, and the chat template shows no format of calls. The server's --tool-call-format names one."
        raise ApiError(400, text, param=param)
    return ToolChoice(
        offered=tools,
        callable=[tool for tool in tools if not names or tool.function.name in names],
        required=mode == "required",
        form=form if tools else None,
        parallel=body.parallel_tool_calls is not False and not legacy and not (mode == "required" and len(names) == 1),
        legacy=legacy,
    )


def _read_choice(wanted: str | dict[str, Any] | None, param: str) -> tuple[str, list[str]]:
    """Returns none, auto or required, and the names of the tools that may be called: all without any."""
    if wanted is None or wanted in ("auto", "none", "required"):
        return str(wanted or "auto"), []
    if isinstance(wanted, dict):
        if wanted.get("type") == "allowed_tools":
            inner = wanted.get("allowed_tools", wanted)
            mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
            names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
            if mode in ("auto", "required") and names and None not in names:
                return mode, [str(name) for name in names]
        elif (name := _name_of(wanted)) is not None:
            return "required", [name]
    text = f'{param} may be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}.'
    raise ApiError(400, text, param=param)


def _name_of(tool: Any) -> str | None:
    """Returns the name of a tool as chats ({"function": {"name"}}), functions and responses ({"name"}) write it."""
    if not isinstance(tool, dict):
        return None
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None
