"""`POST /v1/chat/completions`: messages through the tokenizer's chat template, or as a plain dialogue, answered as a message.

An answer, whole or as it grows, has reasoning, content, calls of tools, and log-probabilities.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.split_answer_parts import AnswerSplitter, ReasoningParser, opens_reasoning
from petatron.infer.tool_calls import ToolCallParser
from petatron.serve.generation_handle import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.beam_search import check_beams
from petatron.serve.http.chat_tools import ToolChoice, choose_tools
from petatron.serve.http.image_messages import ChatPrompt, MessageWriter
from petatron.serve.http.image_parts import measure_images
from petatron.serve.http.json_body import ignore_fields, read_request
from petatron.serve.http.openai_requests import ChatCompletionRequest, ChatMessage, ChatPromptFields, ChatTool, TextPart
from petatron.serve.http.request_to_engine import (
    check_prompt,
    check_text,
    encode_prompts,
    new_tokens,
    sampling_params,
)
from petatron.serve.http.routes.completions import answer_request, check_batch, check_samples, continuous_usage
from petatron.serve.http.run_generations import TokenStream
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.http.token_usage import RunningUsage, reasoning_tokens_of, usage
from petatron.serve.logprob_formats import chat_logprobs, prompt_logprobs
from petatron.serve.served_model_properties import ModelCard

THINKING = "enable_thinking"


async def post_chat_completion(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, ChatCompletionRequest)
    model = state.check_model(body.model)
    check_batch(body.n or 1, state)
    chat = await prepare_chat(body, state)
    ignore_fields(request, unread_template_values(body, model))
    return await answer_request(
        request, body, ChatAnswer(body, model, chat), [chat.ids], chat.params, images=chat.images
    )


async def prepare_chat(body: ChatCompletionRequest, state: ServerState) -> PreparedChat:
    """Renders and encodes the messages, and reads how they are answered."""
    check_samples(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs true.", param="top_logprobs")
    model, limits = state.model, state.options.limits
    tools = choose_tools(body, state.options.tool_format(model.chat_template.tool_source))
    measured = await measure_images(body.messages, model, limits)
    if measured is not None and (body.use_beam_search or body.truncate_prompt_tokens is not None):
        param = "use_beam_search" if body.use_beam_search else "truncate_prompt_tokens"
        raise ApiError(400, f"{param} does not go with images. Leave it out.", param=param)
    prompt = await chat_prompt(body.messages, body, model, tools=tools.offered)
    prefix = model.prefix_ids if body.add_special_tokens else model.chat_prefix_ids  # which a template writes itself
    if measured is None:
        [(ids, _)] = await encode_prompts(prompt.text, body, model, limits, param="messages", prefix=prefix)
        images = None
    else:
        check_text(prompt.text, model, limits, param="messages")
        ids = [*prefix, *await measured.encode(prompt.around_images)]
        check_prompt(ids, model, limits, param="messages")
        images = await measured.read()
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
    splitter = splitter_of(prompt.text, tools, state, separates_reasoning=is_apart)
    return PreparedChat(prompt.text, ids, params, tools, splitter, images)


def constrain_to_tools(params: SamplingParams, tools: ToolChoice, model: ModelCard) -> SamplingParams:
    """Holds the answer to the grammar of calls, where the request forces or checks them."""
    grammar = tools.constraint(model)
    if grammar is None:
        return params
    if params.constraint is not None:
        text = "tool_choice and strict tools constrain the answer, and response_format does too. Send one of them."
        raise ApiError(400, text, param="response_format")
    return replace(params, constraint=grammar)


def splitter_of(
    prompt: str, tools: ToolChoice, state: ServerState, *, separates_reasoning: bool
) -> Callable[[], AnswerSplitter]:
    """Returns a factory of answer splitters: parsers have state, so each answer needs its own."""
    form = state.options.reasoning_tags(_template_source(state.model)) if separates_reasoning else None

    def build() -> AnswerSplitter:
        parser = None if tools.form is None else ToolCallParser(tools.form, tools.names)
        reasoning = None if form is None else ReasoningParser(form, inside=opens_reasoning(prompt, form))
        return AnswerSplitter(reasoning, parser, max_calls=None if tools.parallel else 1)

    return build


def _template_source(model: ModelCard) -> str:
    return model.chat_template.source + model.chat_template.tool_source


async def chat_prompt(
    messages: Sequence[ChatMessage], body: ChatPromptFields, model: ModelCard, *, tools: Sequence[ChatTool]
) -> ChatPrompt:
    """Returns the text of the messages; it ends with the last message if that is to be continued."""
    writer = MessageWriter(model)
    given = [tool.model_dump(exclude_unset=True) for tool in tools] or None
    values = _template_values(body, model)

    async def render(messages: Sequence[ChatMessage], *, generate: bool) -> str:
        plain = [_plain(message, writer) for message in messages]
        return await model.render_chat(plain, tools=given, add_generation_prompt=generate, values=values)

    if not body.continue_final_message:
        return writer.split(await render(messages, generate=body.add_generation_prompt is not False), messages)
    last = messages[-1]
    if (last.model_extra or {}).get("tool_calls"):
        text = "The last message has tool_calls, after which its content cannot go on."
        raise ApiError(400, text, param="continue_final_message")
    # The template may write something after the content, or trim it: a mark at its end says where it is.
    mark = f"\ue000{secrets.token_hex(8)}\ue001"
    content = last.content if isinstance(last.content, list) else [TextPart(type="text", text=last.content or "")]
    parts = [*content, TextPart(type="text", text=mark)]
    marked = [*messages[:-1], last.model_copy(update={"content": parts})]
    text = await render(marked, generate=False)
    before, mark_found, _ = text.rpartition(mark)
    if not mark_found:
        why = (
            "The model's chat template does not write the content of the last message, so that it cannot be continued."
        )
        raise ApiError(400, why, param="continue_final_message")
    return writer.split(before, messages)


def _template_values(body: ChatPromptFields, model: ModelCard) -> dict[str, Any]:
    """Returns the values of the template that a request sets by name, which the template must read."""
    values, source, effort = dict(body.chat_template_kwargs or {}), _template_source(model), body.reasoning_effort
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
    source = _template_source(model)
    return [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in source]


def _plain(message: ChatMessage, writer: MessageWriter) -> dict[str, Any]:
    """Returns a message as templates read it: reasoning under both of its names, and no missing content, which they write as None."""
    extra, content = message.model_extra or {}, writer.content(message)
    if isinstance(former := extra.get("tool_calls"), list):
        extra = {**extra, "tool_calls": [_readable_call(call) for call in former]}
    reasoning = extra.get("reasoning_content") or extra.get("reasoning")
    named = {"reasoning_content": reasoning, "reasoning": reasoning} if isinstance(reasoning, str) else {}
    calls = extra.get("tool_calls") or extra.get("function_call")
    text = "" if content is None and not calls else content
    return {**extra, **named, "role": message.role, "content": text}


def message_text(message: ChatMessage) -> str | None:
    content = message.content
    if isinstance(content, list):
        return "".join(part.text for part in content if isinstance(part, TextPart))
    return content


def _readable_call(call: Any) -> Any:
    """Parses the arguments of earlier tool calls, which clients send as text and templates read as objects."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str):
        return call
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": read}} if isinstance(read, dict) else call


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat, prepared for the engine. text: its prompt. splitter: returns the splitter of one answer."""

    text: str
    ids: Sequence[int]
    params: SamplingParams
    tools: ToolChoice
    splitter: Callable[[], AnswerSplitter]
    images: PromptImages | None = None


class ChatAnswer:
    """The answers to one request; each echoes the assistant's last message if the request asks for it."""

    def __init__(self, body: ChatCompletionRequest, model: ModelCard, chat: PreparedChat) -> None:
        self._body, self._model, self._prompt_ids, self._prompt_text = body, model, chat.ids, chat.text
        self._splitter, self._legacy, last = chat.splitter, chat.tools.legacy, body.messages[-1]
        self._echoed = message_text(last) or "" if body.echo and last.role == "assistant" else ""
        self._splitters: dict[int, AnswerSplitter] = {}
        self._running = RunningUsage() if continuous_usage(body) else None
        number = body.request_id or secrets.token_hex(12)
        self._head = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": model.name}

    def as_json(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = self._body
        answer = {**self._head, "object": "chat.completion"}
        answer["choices"] = [self._choice(index, completion) for index, completion in enumerate(completions)]
        answer["usage"] = self._usage(completions)
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(completions[0].prompt_logprobs, self._model.texts)
        return answer | self._prompt_parts()

    def stream(self, state: ServerState, generations: Sequence[Generation], inbox: Inbox) -> TokenStream:
        begin = [self._first_piece(generation.index) for generation in generations]
        probe = self._splitter()
        joins = not self._body.return_token_ids and self._running is None
        plain = probe.tools is None and probe.reasoning is None and joins
        text = (lambda index, text: self._piece(index, {"content": text})) if plain else None
        return TokenStream(
            state, generations, inbox, begin=begin, text=text, chunk=self._chunk, end=self._end, joins=joins
        )

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parts = self._split(index, completion.text, final=True)
        content = self._echoed + parts.get("content", "")
        has_other = "tool_calls" in parts or "function_call" in parts or "reasoning" in parts
        message = {"role": "assistant", "content": content or (None if has_other else ""), "refusal": None}
        message |= {name: parts[name] for name in ("reasoning_content", "reasoning", "function_call") if name in parts}
        if "tool_calls" in parts:
            message["tool_calls"] = [
                {name: call[name] for name in call if name != "index"} for call in parts["tool_calls"]
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(index, completion.finish_reason),
            "stop_reason": completion.stop,
        }
        return choice | ({"token_ids": list(completion.ids)} if self._body.return_token_ids else {})

    def _chunk(self, generation: Generation, event: TokenEvent) -> dict[str, Any] | None:
        delta = self._split(generation.index, event.text, final=event.finish_reason is not None)
        silent = not delta and event.logprob is None and event.finish_reason is None
        if silent and not self._body.return_token_ids and self._running is None:
            return None
        logprobs = None if event.logprob is None else self._logprobs([event.logprob])
        if not delta and event.finish_reason is None:
            delta = {"content": ""}
        reason = self._finish_reason(generation.index, event.finish_reason)
        piece = self._piece(generation.index, delta, logprobs=logprobs, finish_reason=reason)
        if event.finish_reason is not None:
            piece["choices"][0]["stop_reason"] = generation.stop
        if self._body.return_token_ids:
            piece["choices"][0]["token_ids"] = [] if event.token is None else [event.token]
        if self._running is not None:
            piece["usage"] = self._running.after(len(self._prompt_ids), generation.index, event)
        return piece

    def _first_piece(self, index: int) -> dict[str, Any]:
        """Returns the chunk before the first token; it has the prompt if the request asks for it."""
        piece = self._piece(index, {"role": "assistant", "content": self._echoed}) | self._prompt_parts()
        if self._running is not None:
            piece["usage"] = self._running.after(len(self._prompt_ids), index, None)
        return piece

    def _prompt_parts(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": list(self._prompt_ids)} if self._body.return_token_ids else {}
        return ids | ({"prompt_text": self._prompt_text} if self._body.return_prompt_text else {})

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any]:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(entries, self._model.texts, as_ids=as_ids)

    def _split(self, index: int, text: str, *, final: bool) -> dict[str, Any]:
        """Returns the new parts of an answer by the names of the API, without empty ones."""
        if index not in self._splitters:
            self._splitters[index] = self._splitter()
        splitter = self._splitters[index]
        first = splitter.num_calls
        new = splitter.feed(text, final=final)
        parts: dict[str, Any] = {"content": new.content} if new.content else {}
        if new.reasoning and self._body.include_reasoning is not False:
            parts |= {"reasoning_content": new.reasoning, "reasoning": new.reasoning}
        if new.calls and self._legacy:
            parts["function_call"] = new.calls[0]._asdict()
        elif new.calls:
            parts["tool_calls"] = [
                {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()}
                for number, call in enumerate(new.calls, first)
            ]
        return parts

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        called = index in self._splitters and self._splitters[index].num_calls > 0
        if not called or reason != "stop":
            return reason
        return "function_call" if self._legacy else "tool_calls"

    def _piece(self, index: int, delta: dict[str, Any], **given: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **given}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _end(self, completions: list[Completion]) -> list[dict[str, Any]]:
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage(completions)}]

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        splitter, texts = self._splitter(), self._model.texts
        reasoning = sum(reasoning_tokens_of(completion, splitter, texts) for completion in completions)
        return usage(len(self._prompt_ids), completions, n=len(completions), reasoning_tokens=reasoning)
