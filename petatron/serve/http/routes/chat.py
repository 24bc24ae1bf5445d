"""`POST /v1/chat/completions`: messages through the tokenizer's chat template, or as a plain dialogue, answered as a message."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from petatron.infer.completion import Completion, TokenEvent
from petatron.serve.generation import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import read_body
from petatron.serve.http.openai_requests import ChatCompletionRequest, ChatMessage, ChatTool
from petatron.serve.http.routes.completions import check_batch, usage
from petatron.serve.http.run_generations import TokenStream, answer_of, complete
from petatron.serve.http.sampling import check_prompt, check_text, encode_text, new_tokens, samples, sampling_params
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.logprob_formats import chat_logprobs
from petatron.serve.model_card import ModelCard
from petatron.serve.tool_calls import ToolCallFormat, ToolCallParser


async def post_chat_completion(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, ChatCompletionRequest)
    model = state.check_model(body.model)
    _check(body)
    limits, n = state.options.limits, body.n or 1
    check_batch(n, state)
    prompt_text = await chat_prompt(body, model)
    check_text(prompt_text, model, limits, param="messages")
    ids = await encode_chat(prompt_text, model)
    check_prompt(ids, model, limits, param="messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body,
        model,
        limits,
        max_new_tokens=new_tokens(asked, model.max_length, [ids], model, limits),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    params = replace(params, stop_strings=tuple(dict.fromkeys((*params.stop_strings, *model.chat_stop_strings))))
    inbox: Inbox | None = Inbox() if body.stream else None
    generations = [
        Generation(prompt, one, index=index, inbox=inbox)
        for index, (prompt, one) in enumerate(samples([ids], params, n, model))
    ]
    answer = _ChatAnswer(body, model, len(ids), tool_format=_tool_format(body, state))
    if inbox is not None:
        return await answer.stream(state, generations, inbox).prepare(request)
    completions = await complete(request, state, generations)
    return await answer_of(generations, lambda: answer.whole(completions))


async def chat_prompt(body: ChatCompletionRequest, model: ModelCard) -> str:
    """Returns the text of the messages."""
    tools = [one.model_dump() for one in _offered_tools(body)] or None
    return await render_messages(
        body.messages,
        model,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        values=body.chat_template_kwargs,
    )


def _offered_tools(body: ChatCompletionRequest) -> Sequence[ChatTool]:
    return [] if body.tool_choice == "none" else body.tools or []


def _tool_format(body: ChatCompletionRequest, state: ServerState) -> ToolCallFormat | None:
    """Returns how the answer may call tools; None if none was offered."""
    return state.options.tool_format(state.model.chat_template.tool_source) if _offered_tools(body) else None


async def render_messages(
    messages: Sequence[ChatMessage],
    model: ModelCard,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    values: dict[str, Any] | None = None,
) -> str:
    plain = [_plain(message) for message in messages]
    return await model.render_chat(plain, tools=tools, add_generation_prompt=add_generation_prompt, values=values)


async def encode_chat(text: str, model: ModelCard) -> list[int]:
    """Returns the ids of rendered messages."""
    return [*model.chat_prefix_ids, *await encode_text(text, model)]


def _plain(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    text = "".join(part.text for part in content) if isinstance(content, list) else content
    return {**_readable_calls(message.model_extra or {}), "role": message.role, "content": text}


def _readable_calls(extra: dict[str, Any]) -> dict[str, Any]:
    """Clients send the arguments of former calls as text; templates write them as objects."""
    calls = extra.get("tool_calls")
    if not isinstance(calls, list):
        return extra
    return {**extra, "tool_calls": [_readable_call(one) for one in calls]}


def _readable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str):
        return call
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs true.", param="top_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        text = "tool_choice may be none or auto: tools are shown to the model, which cannot be made to call one."
        raise ApiError(400, text, param="tool_choice")


class _ChatAnswer:
    """Formats one request's answer."""

    def __init__(
        self, body: ChatCompletionRequest, model: ModelCard, prompt_tokens: int, *, tool_format: ToolCallFormat | None
    ) -> None:
        self._body, self._model, self._prompt_tokens = body, model, prompt_tokens
        self._tool_format: ToolCallFormat | None = tool_format
        self._parsers: dict[int, ToolCallParser] = {}
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, one) for index, one in enumerate(completions)]
        totals = usage(self._prompt_tokens, completions)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": totals}

    def stream(self, state: ServerState, generations: Sequence[Generation], inbox: Inbox) -> TokenStream:
        begin = [self._piece(one.index, {"role": "assistant", "content": ""}) for one in generations]
        text = self._text_piece if self._tool_format is None else None
        return TokenStream(state, generations, inbox, begin=begin, text=text, chunk=self._chunk, end=self._end)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = chat_logprobs(completion.logprobs, self._model.texts) if self._body.logprobs else None
        delta = self._delta(index, completion.text, completion.finish_reason)
        message = {"role": "assistant", "content": delta.get("content", None if delta else ""), "refusal": None}
        if "tool_calls" in delta:
            message["tool_calls"] = [
                {name: call[name] for name in call if name != "index"} for call in delta["tool_calls"]
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(index, completion.finish_reason),
            "stop_reason": completion.stop,
        }

    def _chunk(self, generation: Generation, event: TokenEvent) -> dict[str, Any] | None:
        delta = self._delta(generation.index, event.text, event.finish_reason)
        if not delta and event.logprob is None and event.finish_reason is None:
            return None
        logprobs = None if event.logprob is None else chat_logprobs([event.logprob], self._model.texts)
        if not delta and event.finish_reason is None:
            delta = {"content": ""}
        return self._piece(
            generation.index, delta, logprobs, self._finish_reason(generation.index, event.finish_reason)
        )

    def _delta(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Returns the new content and calls of tools; nothing of either is left out where there is none."""
        if self._tool_format is None:
            return {"content": text} if text else {}
        parser = self._parser(index)
        first, found = parser.num_calls, [parser.feed(text)]
        if finish_reason is not None:
            found.append(parser.finish())
        content, calls = "".join(one.content for one in found), [call for one in found for call in one.calls]
        named = [
            {
                "index": number,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls, first)
        ]
        return ({"content": content} if content else {}) | ({"tool_calls": named} if named else {})

    def _parser(self, index: int) -> ToolCallParser:
        if index not in self._parsers:
            assert self._tool_format is not None
            names = {str(tool.function.get("name")) for tool in self._body.tools or []}
            self._parsers[index] = ToolCallParser(self._tool_format, names)
        return self._parsers[index]

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        called = index in self._parsers and self._parsers[index].num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _text_piece(self, index: int, text: str) -> dict[str, Any]:
        return self._piece(index, {"content": text})

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _end(self, completions: list[Completion]) -> list[dict[str, Any]]:
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        totals = usage(self._prompt_tokens, completions)
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": totals}]
