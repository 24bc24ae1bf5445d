"""Formats the answer to a chat, whole or as it grows: reasoning, content, calls of tools, log-probabilities."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from petatron.infer.completion import Completion, TokenEvent
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.answer_splitter import AnswerSplitter
from petatron.serve.generation import Generation, Inbox
from petatron.serve.http.chat_tools import ToolChoice
from petatron.serve.http.openai_requests import ChatCompletionRequest
from petatron.serve.http.run_generations import TokenStream
from petatron.serve.http.server_state import ServerState
from petatron.serve.http.token_usage import RunningUsage, reasoning_tokens_of, usage
from petatron.serve.logprob_formats import chat_logprobs, prompt_logprobs
from petatron.serve.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat as the engine gets it. text: of its prompt. splitter: makes that of one answer."""

    text: str
    ids: Sequence[int]
    params: SamplingParams
    tools: ToolChoice
    splitter: Callable[[], AnswerSplitter]


class ChatAnswer:
    """Of one request. echoed: text before each answer. continuous_usage: every event of a stream tells the counts so far."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        model: ModelCard,
        chat: PreparedChat,
        *,
        echoed: str = "",
        continuous_usage: bool = False,
    ) -> None:
        self._body, self._model, self._prompt_ids, self._prompt_text = body, model, chat.ids, chat.text
        self._splitter, self._echoed, self._legacy = chat.splitter, echoed, chat.tools.legacy
        self._splitters: dict[int, AnswerSplitter] = {}
        self._running = RunningUsage() if continuous_usage else None
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
        """Returns the piece before the first token, which tells the prompt where it is asked for."""
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
        """Returns the new parts of an answer under the names that clients read; those that are empty are left out."""
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
