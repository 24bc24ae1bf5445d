"""The body of OpenAI's Responses API (`/v1/responses`), translated to the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from petatron.infer.sampling_params import MAX_TOP_LOGPROBS
from petatron.serve.http.api_error import ApiError, to_api_error
from petatron.serve.http.openai_requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    NestedFields,
    OpenAIRequest,
)
from petatron.serve.http.request_field_rules import FieldRule

LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_EARLIER = ("previous_response_id", "previous_response", "previous_input_messages", "conversation", "prompt")
_KEPT = "The server keeps nothing of a request. Send all items as input."
RESPONSE_RULES: Mapping[str, FieldRule] = {
    **{name: FieldRule("refused", _KEPT) for name in _EARLIER},
    "background": FieldRule("refused", "An answer is sent to who waits for it.", (False,)),
    "context_management": FieldRule("refused", "The model reads the input as it is.", ([],)),
    "image": FieldRule("refused", "Send images to /v1/chat/completions."),
    "max_tool_calls": FieldRule("refused", "The server runs no tools: each call is one of the client."),
    "truncation": FieldRule("refused", "Use truncate_prompt_tokens, which keeps the last tokens.", ("disabled",)),
    "n": FieldRule("refused", "A response is one answer.", (1,)),
    **{name: FieldRule("refused", "Use max_output_tokens.") for name in ("max_tokens", "max_completion_tokens")},
    "messages": FieldRule("refused", "Use input."),
    **{name: FieldRule("refused", "Use tools and tool_choice.") for name in ("functions", "function_call")},
    "access_programs": FieldRule("none"),
    "logprobs": FieldRule("refused", f"Use include [{LOGPROBS!r}].", (False,)),
    "enable_response_messages": FieldRule("refused", "Use return_prompt_text of /v1/chat/completions.", (False,)),
}
"""Fields of this route alone."""


class TextFormat(NestedFields):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(NestedFields):
    effort: str | None = None


class ResponsesRequest(OpenAIRequest):
    """POST /v1/responses. Fields of chats that the API does not name, such as top_k or structured_outputs, are taken too."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextFormat | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=min(20, MAX_TOP_LOGPROBS))] | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None


_NAMED_HERE = {
    *ResponsesRequest.model_fields,
    *"n messages max_tokens max_completion_tokens functions function_call logprobs".split(),
}
_SHARED = tuple(name for name in ChatCompletionRequest.model_fields if name not in _NAMED_HERE)
"""Fields of chats that this route takes under the same name."""


def chat_of(body: ResponsesRequest) -> tuple[ChatCompletionRequest, dict[str, Any]]:
    """Returns the chat that answers the request, and the fields that neither has."""
    extra = dict(body.model_extra or {})
    values: dict[str, Any] = {name: extra.pop(name) for name in _SHARED if name in extra}
    values |= {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream,
        "logprobs": LOGPROBS in (body.include or []),
        "top_logprobs": body.top_logprobs if LOGPROBS in (body.include or []) else None,
    }
    if body.top_logprobs and not values["logprobs"]:
        raise ApiError(400, f"top_logprobs needs include [{LOGPROBS!r}].", param="top_logprobs")
    if body.reasoning is not None and body.reasoning.effort is not None:
        _check_once("reasoning_effort", "reasoning.effort", values)
        values["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        _check_once("response_format", "text.format", values)
        wanted = body.text.format  # a schema is beside its type here, and in chats inside json_schema
        schema = {"name": wanted.get("name"), "schema": wanted.get("schema")}
        is_schema = wanted.get("type") == "json_schema"
        values["response_format"] = {"type": "json_schema", "json_schema": schema} if is_schema else dict(wanted)
    try:
        return ChatCompletionRequest.model_validate(values), extra
    except ValidationError as error:
        raise in_own_names(to_api_error(error), body) from None


def in_own_names(error: ApiError, body: ResponsesRequest) -> ApiError:
    """Returns an error of the chat with the field of this route that it is about."""
    names = {"messages": "input", "max_tokens": "max_output_tokens"}
    names |= {"response_format": "text"} if body.text is not None and body.text.format is not None else {}
    names |= {"reasoning_effort": "reasoning"} if body.reasoning is not None and body.reasoning.effort else {}
    error.param = names.get(error.param or "", error.param)
    return error


def _check_once(chat_name: str, name: str, values: Mapping[str, Any]) -> None:
    if values.get(chat_name) is not None:
        raise ApiError(400, f"{chat_name} is the name of {name} in chats. Send one of them.", param=chat_name)


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Here a function is the tool itself, and in chats inside it."""
    if given.get("type") != "function":
        text = f"A tool of type {str(given.get('type'))[:40]} is not supported: tools are functions of the client."
        raise ApiError(400, text, param="tools")
    inner = given.get("function")
    function = inner if isinstance(inner, dict) else {name: value for name, value in given.items() if name != "type"}
    return {"type": "function", "function": function}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    reasoning: str | None = None
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = _text(item.get("content") or item.get("summary") or [], number)
        elif kind == "function_call_output":
            content = _text(item.get("output", ""), number)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "function_call":
            _add_call(messages, item, reasoning)
            reasoning = None
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            message = {"role": role, "content": _text(item.get("content", ""), number)}
            if role == "assistant" and reasoning is not None:
                message["reasoning_content"], reasoning = reasoning, None
            messages.append(message)
        else:
            raise ApiError(400, f"input.{number}: an item of type {str(kind)[:40]} is not supported.", param="input")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], reasoning: str | None) -> None:
    """Calls that follow each other are those of one message."""
    call = {"id": item.get("call_id"), "type": "function"}
    call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
    if messages and messages[-1].get("role") == "assistant" and "tool_calls" in messages[-1]:
        messages[-1]["tool_calls"].append(call)
        return
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages.append(message | ({} if reasoning is None else {"reasoning_content": reasoning}))


def _text(content: Any, number: int) -> str:
    """Returns the text of an item's content: a text, or parts of it."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            text = f"input.{number}: a part of type {str(kind)[:40]} is not supported: text alone is. Send images to /v1/chat/completions."
            raise ApiError(400, text, param="input")
        texts.append(part["text"])
    return "".join(texts)
