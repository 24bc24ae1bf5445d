"""Reads a record as messages, or as a prompt with its completion, or as a text.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": [...]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "..."}
    {"prompt": "2 + 2 =", "completion": " 4"}           texts, or lists of messages
    {"text": "..."}

A message has `tool_calls`, `reasoning_content` and whatever else its template reads. `"train": false`, or `"weight": 0`, leaves an
answer out of the loss; another weight multiplies its losses. Parquet files have every key in every row, with null where a row has no
value: those are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from petatron.base.terminal_escape import printable
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.refused_conversation import RefusedConversation

Message = dict[str, Any]
ASSISTANT = "assistant"
_SHAREGPT_MESSAGES, _SHAREGPT_ROLE, _SHAREGPT_CONTENT = "conversations", "from", "value"
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
}
_ROLES |= {"observation": "tool", "tool_response": "tool", "function_response": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MARKS = ("train", "weight")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, with the weight of each in the loss, and the tools that the assistant may call. first: the first that may be learned."""

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None
    values: dict[str, Any] | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A prompt, empty where all is learned, and what follows it."""

    prompt: str
    completion: str


ReadRecord = Conversation | TextRecord


def read_record(record: object, settings: ConversationSettings) -> ReadRecord:
    """Returns what a record has; raises `RefusedConversation` for another form.

    >>> read_record({"prompt": "2 + 2 =", "completion": " 4"}, ConversationSettings())
    TextRecord(prompt='2 + 2 =', completion=' 4')
    """
    if not isinstance(record, dict):
        raise _wrong(f"is a JSON {type(record).__name__}, not an object: write an object with keys in each line")
    for key in (settings.messages_key, _SHAREGPT_MESSAGES):
        if record.get(key) is not None:
            messages = read_messages(record[key], settings, key)
            return make_conversation(_with_system(messages, record), record, settings)
    prompt, completion = record.get(settings.prompt_key), record.get(settings.completion_key)
    if prompt is not None and completion is not None:
        return read_completion(prompt, completion, record, settings)
    text = record.get(settings.text_key)
    if isinstance(text, str):
        return TextRecord("", _nonempty(text, settings.text_key))
    present = ", ".join(printable(str(name), max_chars=40) for name in sorted(record)[:8]) or "none"
    raise _wrong(
        f"has neither {settings.messages_key!r}, nor {settings.prompt_key!r} and {settings.completion_key!r}, nor {settings.text_key!r} "
        f"(keys here: {present}): add one, or name its key, as --dataset-settings messages_key=NAME"
    )


def read_completion(
    prompt: object, completion: object, record: Mapping[str, Any], settings: ConversationSettings
) -> ReadRecord:
    """Returns a prompt with what follows it: both are texts, or both messages."""
    names = (settings.prompt_key, settings.completion_key)
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextRecord(prompt, _nonempty(completion, names[1]))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise _wrong(
            f"has a text and a list in {names[0]!r} and {names[1]!r}: write texts, or lists of messages, in both"
        )
    before, after = (read_messages(x, settings, name) for x, name in zip((prompt, completion), names))
    return make_conversation([*before, *after], record, settings, first=len(before))


def read_messages(messages: object, settings: ConversationSettings, key: str) -> list[Message]:
    """Returns messages with `role` and `content`, whatever these are called in the record."""
    if isinstance(messages, str):
        messages = _parsed(messages, key)
    if not isinstance(messages, list) or not messages:
        raise _wrong(f"has no list of messages in {key!r}: write one, of objects with a role and a content")
    return [_message(message, number, settings, key) for number, message in enumerate(messages, start=1)]


def make_conversation(
    messages: list[Message], record: Mapping[str, Any], settings: ConversationSettings, *, first: int = 0
) -> Conversation:
    """Returns messages as they are rendered, with their weights and what else the record has for its template."""
    weights = [_weight(message, number) for number, message in enumerate(messages, start=1)]
    messages = [{name: value for name, value in message.items() if name not in _MARKS} for message in messages]
    if settings.reasoning != "keep":
        last = max((n for n, message in enumerate(messages) if message["role"] == ASSISTANT), default=-1)
        kept = last if settings.reasoning == "last" else -1
        messages = [message if n == kept else _without_reasoning(message) for n, message in enumerate(messages)]
    tools = record.get(settings.tools_key)
    tools = _parsed(tools, settings.tools_key) if isinstance(tools, str) and tools.strip() else tools
    if tools is not None and tools != "" and not (isinstance(tools, list) and all(isinstance(x, dict) for x in tools)):
        raise _wrong(
            f"has no list of objects in {settings.tools_key!r}: write one for each tool, as OpenAI's API takes them"
        )
    values = record.get("chat_template_kwargs")
    return Conversation(messages, weights, without_nulls(tools) or None, without_nulls(values) or None, first)


def without_nulls(value: Any) -> Any:
    """Returns a value without the keys that are null, which parquet files write where a row has no value."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _message(message: object, number: int, settings: ConversationSettings, key: str) -> Message:
    if not isinstance(message, dict):
        raise _wrong(f"has no object as message {number} of {key!r}: write one with a role and a content")
    role_key = settings.role_key if settings.role_key in message else _SHAREGPT_ROLE
    content_key = settings.content_key if settings.content_key in message else _SHAREGPT_CONTENT
    role = message.get(role_key)
    if not isinstance(role, str) or not role:
        raise _wrong(
            f"has no {settings.role_key!r} in message {number} of {key!r}: name who says it, or its key with role_key=NAME"
        )
    content = message.get(content_key)
    rest = {
        name: without_nulls(x) for name, x in message.items() if x is not None and name not in (role_key, content_key)
    }
    role = _ROLES.get(role, role)
    if role_key == _SHAREGPT_ROLE and role == "function_call":
        role, content, rest["tool_calls"] = ASSISTANT, None, [_function_call(content, number)]
    if not isinstance(content, str | list) and not (content is None and rest.get("tool_calls")):
        raise _wrong(
            f"has no text as {settings.content_key!r} of message {number} of {key!r}: write one, or name its key"
        )
    if isinstance(content, list):
        content = _joined(content, number)
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"], number)
    if (reasoning := next((rest[name] for name in _REASONING if isinstance(rest.get(name), str)), None)) is not None:
        rest |= {"reasoning_content": reasoning, "thinking": reasoning}
    return {"role": role, "content": "" if content is None else content, **rest}


def _joined(parts: list[Any], number: int) -> str:
    """Returns the text of a content in parts: templates of text models take texts."""
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in parts):
        raise _wrong(f"has parts that are no texts in message {number}: use --dataset-type image-text for images")
    return "".join(part["text"] for part in parts)


def _tool_calls(calls: object, number: int) -> list[dict[str, Any]]:
    """Returns tool calls whose arguments are objects, as templates write them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _wrong(f"has no list of objects as tool_calls of message {number}: write them as OpenAI's API does")
    result: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"has a tool call without a name in message {number}: write them as OpenAI's API does")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # else a text, which some templates write as it is
                arguments = json.loads(arguments)
        result.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return result


def _function_call(content: object, number: int) -> dict[str, Any]:
    call = _parsed(content, f"message {number}") if isinstance(content, str) else content
    if not isinstance(call, dict):
        raise _wrong(f"has no JSON object as function call in message {number}: write its name and arguments")
    return {"type": "function", "function": call}


def _with_system(messages: list[Message], record: Mapping[str, Any]) -> list[Message]:
    system = record.get("system")
    if not isinstance(system, str) or not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _without_reasoning(message: Message) -> Message:
    if message["role"] != ASSISTANT:
        return message
    message = {name: value for name, value in message.items() if name not in _REASONING}
    content = message["content"]
    if isinstance(content, str) and "</think>" in content:
        message["content"] = content.rpartition("</think>")[2].lstrip("\n")
    return message


def _weight(message: Message, number: int) -> float:
    train, weight = message.get("train", True), message.get("weight", 1)
    if not isinstance(train, bool):
        raise _wrong(f"has 'train' in message {number}, which is neither true nor false: write one of them")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise _wrong(f"has 'weight' in message {number}, which is no number from 0 on: write one, as 0 or 1")
    return float(weight) if train else 0.0


def _nonempty(text: str, key: str) -> str:
    if not text.strip():
        raise RefusedConversation("nothing to learn", f"has an empty {key!r}: leave it out, or give it a text")
    return text


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(f"has a text in {key!r} that is no JSON: write it as JSON") from None


def _wrong(reason: str) -> RefusedConversation:
    return RefusedConversation("wrong form", reason)
