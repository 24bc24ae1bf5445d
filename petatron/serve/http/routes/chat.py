"""`POST /v1/chat/completions`: messages through the tokenizer's chat template, or as a plain dialogue, answered as a message."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from petatron.infer.sampling_params import SamplingParams
from petatron.serve.answer_splitter import AnswerSplitter
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.beams import check_beams
from petatron.serve.http.chat_answer import ChatAnswer, PreparedChat
from petatron.serve.http.chat_tools import ToolChoice, choose_tools
from petatron.serve.http.json_body import ignore_fields, read_request
from petatron.serve.http.openai_requests import ChatCompletionRequest, ChatMessage, ChatPromptFields, ChatTool
from petatron.serve.http.routes.completions import answer_request, check_batch, check_samples, continuous_usage
from petatron.serve.http.sampling import (
    check_prompt,
    check_text,
    encode_text,
    new_tokens,
    sampling_params,
    truncated,
)
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.model_card import ModelCard
from petatron.serve.reasoning import ReasoningParser, opens_reasoning
from petatron.serve.tool_calls import ToolCallParser

THINKING = "enable_thinking"


async def post_chat_completion(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, ChatCompletionRequest)
    model = state.check_model(body.model)
    check_batch(body.n or 1, state)
    chat = await prepare_chat(body, state)
    ignore_fields(request, unread_template_values(body, model))
    last = body.messages[-1]
    echoed = message_text(last) or "" if body.echo and last.role == "assistant" else ""
    answer = ChatAnswer(body, model, chat, echoed=echoed, continuous_usage=continuous_usage(body))
    return await answer_request(request, body, answer, [chat.ids], chat.params)


async def prepare_chat(body: ChatCompletionRequest, state: ServerState) -> PreparedChat:
    """Renders and encodes the messages, and reads how they are answered."""
    check_samples(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs true.", param="top_logprobs")
    model, limits = state.model, state.options.limits
    tools = choose_tools(body, state.options.tool_format(model.chat_template.tool_source))
    prompt = await chat_prompt(body.messages, body, model, tools=tools.offered)
    if body.truncate_prompt_tokens is None:
        check_text(prompt, model, limits, param="messages")
    ids = await encode_chat(prompt, model, add_prefix=bool(body.add_special_tokens))
    ids = truncated(ids, body, model)
    check_prompt(ids, model, limits, param="messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = min(new_tokens(asked, model.max_length, [ids], model, limits), model.max_length - len(ids))
    params = sampling_params(
        body,
        model,
        limits,
        max_new_tokens=room,
        asked_tokens=asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    check_beams(body, constrained=params.constraint is not None)
    params = constrain_to_tools(params, tools, model)
    params = replace(params, stop_strings=tuple(dict.fromkeys((*params.stop_strings, *model.chat_stop_strings))))
    # A constraint is one of the content, from its first token on.
    is_apart = body.separate_reasoning is not False and params.constraint is None
    reasoning = reasoning_of(prompt, state) if is_apart else None
    return PreparedChat(prompt, ids, params, tools, splitter_of(tools, reasoning))


def constrain_to_tools(params: SamplingParams, tools: ToolChoice, model: ModelCard) -> SamplingParams:
    """Holds the answer to the grammar of calls, where the request forces or checks them."""
    grammar = tools.constraint(model)
    if grammar is None:
        return params
    if params.constraint is not None:
        text = "tool_choice and strict tools constrain the answer, and response_format does too. Send one of them."
        raise ApiError(400, text, param="response_format")
    return replace(params, constraint=grammar)


def splitter_of(tools: ToolChoice, reasoning: ReasoningParser | None) -> Callable[[], AnswerSplitter]:
    """Returns what makes the splitter of one answer. A parser is a state, so each answer has its own."""

    def build() -> AnswerSplitter:
        parser = None if tools.form is None else ToolCallParser(tools.form, tools.names)
        reasoning_parser = None if reasoning is None else ReasoningParser(reasoning.form, inside=reasoning.inside)
        return AnswerSplitter(reasoning_parser, parser, max_calls=None if tools.parallel else 1)

    return build


def reasoning_of(prompt: str, state: ServerState) -> ReasoningParser | None:
    """Returns the parser of reasoning for answers to a prompt; None if the model's chat template shows none."""
    template = state.model.chat_template
    form = state.options.reasoning_tags(template.source + template.tool_source)
    return None if form is None else ReasoningParser(form, inside=opens_reasoning(prompt, form))


async def chat_prompt(
    messages: Sequence[ChatMessage], body: ChatPromptFields, model: ModelCard, *, tools: Sequence[ChatTool]
) -> str:
    """Returns the text of the messages; where the last one is to be continued, it ends with it."""
    given = [tool.model_dump(exclude_unset=True) for tool in tools] or None
    values = _template_values(body, model)
    if not body.continue_final_message:
        generate = body.add_generation_prompt is not False
        return await render_messages(messages, model, tools=given, add_generation_prompt=generate, values=values)
    last = messages[-1]
    if (last.model_extra or {}).get("tool_calls"):
        text = "The last message has tool_calls, after which its content cannot go on."
        raise ApiError(400, text, param="continue_final_message")
    # The template may write something after the content, or trim it: a mark at its end says where it is.
    mark = f"\ue000{secrets.token_hex(8)}\ue001"
    marked = [*messages[:-1], last.model_copy(update={"content": (message_text(last) or "") + mark})]
    text = await render_messages(marked, model, tools=given, add_generation_prompt=False, values=values)
    before, mark_found, _ = text.rpartition(mark)
    if not mark_found:
        why = (
            "The model's chat template does not write the content of the last message, so that it cannot be continued."
        )
        raise ApiError(400, why, param="continue_final_message")
    return before


def _template_values(body: ChatPromptFields, model: ModelCard) -> dict[str, Any]:
    """Returns the values of the template that a request sets by name, which the template must read."""
    values = dict(body.chat_template_kwargs or {})
    source = model.chat_template.source + model.chat_template.tool_source
    effort = body.reasoning_effort
    given: dict[str, dict[str, Any]] = {"documents": {} if body.documents is None else {"documents": body.documents}}
    # Templates that know no effort may know whether to think at all.
    given["reasoning_effort"] = {} if effort is None else {"reasoning_effort": effort, THINKING: effort != "none"}
    for field, named in given.items():
        read = {name: value for name, value in named.items() if name in source}
        if named and not read:
            raise ApiError(400, f"{field} has no effect: the model's chat template does not read it.", param=field)
        values |= {name: value for name, value in read.items() if name == field or name not in values}
    return values


def unread_template_values(body: ChatPromptFields, model: ModelCard) -> list[str]:
    """Returns the names of a request's chat_template_kwargs that the template does not have."""
    source = model.chat_template.source + model.chat_template.tool_source
    return [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in source]


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


async def encode_chat(text: str, model: ModelCard, *, add_prefix: bool = False) -> list[int]:
    """Returns the ids of rendered messages. add_prefix: those that the tokenizer puts before a text, even if a template writes them."""
    before = model.prefix_ids if add_prefix else model.chat_prefix_ids
    return [*before, *await encode_text(text, model)]


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Returns a message as templates read it. Its reasoning has two names, and a content that is absent would be written as None."""
    extra, content = message.model_extra or {}, message_text(message)
    if isinstance(former := extra.get("tool_calls"), list):
        extra = {**extra, "tool_calls": [_readable_call(call) for call in former]}
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    named = {"reasoning_content": reasoning, "reasoning": reasoning} if isinstance(reasoning, str) else {}
    calls = extra.get("tool_calls") or extra.get("function_call")
    text = "" if content is None and not calls else content
    return {**extra, **named, "role": message.role, "content": text}


def message_text(message: ChatMessage) -> str | None:
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content


def _readable_call(call: Any) -> Any:
    """Clients send the arguments of former calls as text; templates write them as objects."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str):
        return call
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call
