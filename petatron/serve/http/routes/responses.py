"""`POST /v1/responses`: OpenAI's newer form of a chat. The server keeps no response, so each request has all items.

An answer is a response object, or the events of one that is streamed. It is items: reasoning, a message, calls of functions. Each is
opened, grows by deltas, and is closed before the next one opens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from petatron.infer.engine_outputs import Completion, TokenEvent, TokenLogprob
from petatron.infer.tool_calls import ToolCall
from petatron.serve.generation_handle import Generation, Inbox
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.json_body import ignore_fields, nested_unknown_fields, read_request
from petatron.serve.http.openai_requests import ChatCompletionRequest
from petatron.serve.http.request_field_rules import check_extra_fields
from petatron.serve.http.responses_api_requests import RESPONSE_RULES, ResponsesRequest, chat_of, in_own_names
from petatron.serve.http.routes.chat import PreparedChat, prepare_chat, unread_template_values
from petatron.serve.http.run_generations import TokenStream, complete
from petatron.serve.http.server_state import ServerState, state_of
from petatron.serve.http.token_usage import reasoning_tokens_of
from petatron.serve.logprob_formats import AlignedTokens, chat_logprobs
from petatron.serve.served_model_properties import ModelCard

_Event = dict[str, Any]
_WHOLE_ALONE = (
    *("use_beam_search", "echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
    "return_prompt_text",
)
"""Fields of chats that have no place in a response object."""


async def post_response(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(request, ResponsesRequest, others=RESPONSE_RULES)
    chat, extra = chat_of(body)
    request.state.ignored_fields = check_extra_fields(extra, others=RESPONSE_RULES)
    ignore_fields(request, [*nested_unknown_fields(body), *nested_unknown_fields(chat)])
    if unusable := [name for name in _WHOLE_ALONE if (value := getattr(chat, name)) is not None and value is not False]:
        raise ApiError(400, f"{unusable[0]} is one of /v1/chat/completions alone.", param=unusable[0])
    state.check_model(body.model)
    try:
        prepared = await prepare_chat(chat, state)
    except ApiError as error:
        raise in_own_names(error, body) from None
    ignore_fields(request, unread_template_values(chat, state.model))
    answer = ResponseAnswer(body, chat, prepared, state.model)
    inbox: Inbox | None = Inbox() if body.stream else None
    generation = Generation(prepared.ids, prepared.params, inbox=inbox)
    if inbox is not None:
        return await answer.stream(state, generation, inbox).prepare(request)
    [completion] = await complete(request, state, [generation])
    return JSONResponse(answer.as_json(completion))


class ResponseAnswer:
    """The answer to one request."""

    def __init__(
        self, body: ResponsesRequest, chat: ChatCompletionRequest, prepared: PreparedChat, model: ModelCard
    ) -> None:
        self._chat, self._model, self._num_prompt, self._splitter = chat, model, len(prepared.ids), prepared.splitter()
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._aligned = AlignedTokens(model.texts, prepared.params.hidden_ids) if chat.logprobs else None
        self._unlisted: list[TokenLogprob] = []
        self._num_events = 0
        self._head = {
            "id": f"resp_{chat.request_id or secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def as_json(self, completion: Completion) -> dict[str, Any]:
        self._add(completion.text, final=True, logprobs=completion.logprobs)
        return self._response(completion)

    def stream(self, state: ServerState, generation: Generation, inbox: Inbox) -> TokenStream:
        kinds = ("response.created", "response.in_progress")
        begin = [self._event(kind, response=self._response(None)) for kind in kinds]
        return TokenStream(
            state, [generation], inbox, begin=begin, text=None, chunk=self._chunk, end=self._end, named=True
        )

    def _chunk(self, generation: Generation, event: TokenEvent) -> list[_Event]:
        logprobs = [] if event.logprob is None else [event.logprob]
        return self._add(event.text, final=event.finish_reason is not None, logprobs=logprobs)

    def _end(self, completions: list[Completion]) -> list[_Event]:
        kind = "response.incomplete" if completions[0].finish_reason == "length" else "response.completed"
        return [self._event(kind, response=self._response(completions[0]))]

    def _response(self, completion: Completion | None) -> dict[str, Any]:
        """None: it has just begun."""
        response: dict[str, Any] = {**self._head, "status": "in_progress", "error": None, "incomplete_details": None}
        if completion is None:
            return response | {"output": [], "usage": None}
        cut = completion.finish_reason == "length"
        response |= {"status": "incomplete"} if cut else {"status": "completed"}
        response |= {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        reasoning = reasoning_tokens_of(completion, self._splitter, self._model.texts)
        usage = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(completion.ids),
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": self._num_prompt + len(completion.ids),
        }
        return response | {"output": self._items, "usage": usage}

    def _add(self, text: str, *, final: bool, logprobs: Sequence[TokenLogprob] = ()) -> list[_Event]:
        """Takes new text of the answer, and returns the events of it."""
        events: list[_Event] = []
        if self._aligned is not None:
            for piece, entry in self._aligned.take(text, logprobs):
                events += self._feed(piece, [entry])
            text, logprobs = self._aligned.rest() if final else ("", ())
        return events + (self._feed(text, logprobs, final=final) if text or final else [])

    def _feed(self, text: str, logprobs: Sequence[TokenLogprob], *, final: bool = False) -> list[_Event]:
        """Returns the events of a piece of text and its tokens. Tokens of reasoning and of calls do not count as those of a message."""
        parts = self._splitter.feed(text, final=final)
        parser, events = self._splitter.reasoning, list[_Event]()
        self._unlisted += logprobs
        if parts.calls or (parser is not None and parser.is_apart):
            self._unlisted.clear()
        if parts.reasoning and self._chat.include_reasoning is not False:
            events += self._grow("reasoning", parts.reasoning, [])
        if parts.content:
            events += self._grow("message", parts.content, self._take_logprobs())
        for call in parts.calls:
            events += [*self._close(), *self._call(call)]
        if final:
            if not self._items or (self._is_open and self._items[-1]["type"] == "message"):
                events += self._grow("message", "", self._take_logprobs())
            events += self._close()
        return events

    def _take_logprobs(self) -> list[Any]:
        listed = chat_logprobs(self._unlisted, self._model.texts)["content"] if self._unlisted else []
        self._unlisted.clear()
        return listed

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> list[_Event]:
        events: list[_Event] = []
        if not self._is_open or self._items[-1]["type"] != kind:
            events += [*self._close(), *self._open(kind)]
        part, place = self._last_part()
        part["text"] += text
        name, listed = ("reasoning", {}) if kind == "reasoning" else ("output", {"logprobs": logprobs})
        if kind == "message":
            part["logprobs"] += logprobs
        return [*events, self._event(f"response.{name}_text.delta", **place, delta=text, **listed)] if text else events

    def _last_part(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the content of the last item, and where it is."""
        item = self._items[-1]
        return item["content"][0], {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _open(self, kind: str) -> list[_Event]:
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": [part]}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "content": [part]}
        item["status"] = "in_progress"
        self._items.append(item)
        self._is_open = True
        _, place = self._last_part()
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item={**item, "content": []}),
            self._event("response.content_part.added", **place, part=dict(part)),
        ]

    def _close(self) -> list[_Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed"
        part, place = self._last_part()
        name = "reasoning" if item["type"] == "reasoning" else "output"
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            self._event(f"response.{name}_text.done", **place, **text),
            self._event("response.content_part.done", **place, part=dict(part)),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _call(self, call: ToolCall) -> list[_Event]:
        number, index = secrets.token_hex(12), len(self._items)
        item = {"id": f"fc_{number}", "type": "function_call", "call_id": f"call_{secrets.token_hex(12)}"}
        item |= {**call._asdict(), "status": "completed"}
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, **call._asdict()),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _event(self, kind: str, **values: Any) -> _Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **values}
