"""Which characters of a rendered conversation the assistant wrote: what the loss reads.

A template that marks them (`{% generation %}`) says it. Of others it follows from what they write for parts of a conversation:

    prompt(k)  messages before k, and what invites the assistant to answer     "...<|im_start|>assistant\\n"
    upto(k)    messages up to k                                                "...<|im_start|>assistant\\nHello<|im_end|>\\n"

Where the text begins with both, answer k is what `upto(k)` adds to `prompt(k)`: exactly what a served model is asked to continue with,
and the end of its turn. Most templates are like that. Some write a message differently once others follow:

    Qwen3       an empty thinking part in the last answer alone; reasoning is left out of answers before the last question
    Phi-3       the end-of-text token after the last message
    Mistral     tools before the last question
    DeepSeek-R1 an invitation that ends in `<think>\\n`, which earlier answers do not have

There another rendering tells the place of answer k: one in which a character that no text has follows the content of message k. Up to
there the two renderings agree, and what they have after it is what the template writes after the answer. The answer begins after the
last invitation before that place, and ends where what follows it differs from what follows it in `upto(k)`. An answer whose place
remains unclear is refused: the loss would read something else than the user means.

Templates that end a turn with the beginning of the next one (GLM-4) leave an answer without its end; the special token that follows it
counts as its end then, and the end-of-document token after the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import DataError
from petatron.data.conversations.conversation_record import ASSISTANT, Conversation, Message
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.encoded_text import Span
from petatron.data.prompt.chat_template import ChatTemplate

_PROBE = "\U000fdcb2"
"""A character for private use, which no text has."""
_FIX = "mark what the assistant writes by {% generation %} in a template (--chat-template FILE), or leave the record out with on_error=skip"


@dataclass(frozen=True, slots=True)
class Answer:
    """The number of an assistant's message, and its characters in the rendered conversation, with what ends its turn."""

    message: int
    span: Span


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    text: str
    answers: list[Answer]


class AnswerFinder:
    """Renders conversations, and finds the assistant's answers in them.

    tokens: texts that are one token each. ends: those of them that may end a turn.
    """

    def __init__(
        self, template: ChatTemplate, values: dict[str, Any], tokens: Sequence[str], ends: Sequence[str]
    ) -> None:
        self._template, self._values = template, values
        self._tokens, self._ends = _any_of(tokens), _any_of(ends)
        self._arguments_are_texts = False

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Raises `RefusedConversation` where the template refuses the messages, or an answer's place is unclear."""
        asked = [k for k, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        if self._template.has_marks:
            text, spans = self._render(conversation, len(conversation.messages), marked=True)
            return RenderedConversation(text, self._marked_answers(spans, asked))
        text = self._render(conversation, len(conversation.messages))[0]
        answers: list[Answer] = []
        end = 0
        for k in asked:
            begin, end = self._find(conversation, k, text, end)
            answers.append(Answer(k, (begin, end)))
        return RenderedConversation(text, answers)

    def prompt(self, conversation: Conversation, length: int) -> str:
        """Returns the text that a served model continues with its answer to the first messages."""
        return self._render(conversation, length, asks=True)[0]

    def _marked_answers(self, spans: list[Span], asked: list[int]) -> list[Answer]:
        """Gives marked texts to messages in their order; what is left over at the end, as an end-of-text token, is the last one's."""
        if len(spans) < len(asked):
            reason = f"has {len(asked)} answers, and its template marks {len(spans)} of them as generated"
            raise RefusedConversation("unclear mask", f"{reason}: put {{% generation %}} around each in the template")
        numbers = [*asked, *asked[-1:] * (len(spans) - len(asked))] if asked else []
        return [Answer(k, span) for k, span in zip(numbers, spans)]

    def _find(self, conversation: Conversation, k: int, text: str, begins_after: int) -> Span:
        prompt, upto = self._attempt(conversation, k, asks=True), self._attempt(conversation, k + 1)
        probe: _Probe | None = None
        if prompt is not None and text.startswith(prompt) and len(prompt) >= begins_after:
            begin = len(prompt)
        else:
            probe = self._probe(conversation, k, text, upto)
            begin = self._begin(conversation, k, text, prompt, probe, begins_after)
        if upto is not None and text.startswith(upto) and len(upto) >= begin:
            end = len(upto)
        else:
            probe = probe or self._probe(conversation, k, text, upto)
            end = self._end(text, probe)
        end = self._with_end_of_turn(text, begin, end)
        self._check(conversation.messages[k], k, text[begin:end])
        return begin, end

    def _begin(
        self, conversation: Conversation, k: int, text: str, prompt: str | None, probe: _Probe, begins_after: int
    ) -> int:
        before = self._attempt(conversation, k)
        if before is not None and prompt is not None and text.startswith(before):
            content = self._probe(conversation, k, text, None, at_begin=True).place
            return self._outside_token(text, begins_after, min(shared_length(prompt, text), content))
        invitation = (
            prompt[len(before) :] if before is not None and prompt is not None and prompt.startswith(before) else ""
        )
        if invitation:
            place = text.rfind(invitation, begins_after, probe.place)
            if place >= 0:
                return place + len(invitation)
        first = self._probe(conversation, k, text, None, at_begin=True).place
        if first < begins_after:
            raise _unclear(k, "begins")
        return first

    def _end(self, text: str, probe: _Probe) -> int:
        """Returns where what follows the answer in the conversation differs from what follows it where it is the last message."""
        return self._outside_token(
            text, probe.place, probe.place + shared_length(text[probe.place :], probe.after_last)
        )

    def _outside_token(self, text: str, begin: int, place: int) -> int:
        """Returns a place, or where the token begins that it is within: two texts may differ in the middle of two tokens."""
        if self._tokens is not None:
            for match in self._tokens.finditer(text, begin):
                if match.start() >= place:
                    break
                if match.end() > place:
                    return match.start()
        return place

    def _with_end_of_turn(self, text: str, begin: int, end: int) -> int:
        """Returns the end with the special token right after an answer that has none."""
        if self._ends is None or self.has_end_of_turn(text[begin:end]):
            return end
        following = self._ends.match(text, end)
        return end if following is None else following.end()

    def has_end_of_turn(self, answer: str) -> bool:
        """Whether an answer ends with a token that ends a turn."""
        return self.end_of_turn(answer) is not None

    def end_of_turn(self, answer: str) -> str | None:
        """Returns the first of the special tokens that an answer ends with; None if it ends with none."""
        tokens = [] if self._ends is None else list(self._ends.finditer(answer))
        first, end = None, len(answer.rstrip())
        for token in reversed(tokens):
            if answer[token.end() : end].strip():
                break
            first, end = token[0], token.start()
        return first

    def _probe(
        self, conversation: Conversation, k: int, text: str, upto: str | None, *, at_begin: bool = False
    ) -> _Probe:
        changed = _probed(conversation.messages[k], at_begin=at_begin)
        messages = [*conversation.messages[:k], changed, *conversation.messages[k + 1 :]]
        probed = self._render(_with_messages(conversation, messages), len(messages))[0]
        place = shared_length(text, probed)
        if place == len(text) or _PROBE not in probed:
            raise _unclear(k, "is")
        after_last = ""
        if upto is not None:
            of_last = self._render(_with_messages(conversation, messages), k + 1)[0]
            after_last = upto[shared_length(upto, of_last) :]
        return _Probe(place, after_last)

    def _check(self, message: Message, k: int, answer: str) -> None:
        """Raises unless an answer has the end of what its message says: templates may drop its beginning, as reasoning."""
        last = message["content"].rpartition("</think>")[2].strip()
        if last and last not in answer:
            raise _unclear(k, "is")

    def _attempt(self, conversation: Conversation, length: int, *, asks: bool = False) -> str | None:
        try:
            return self._render(conversation, length, asks=asks)[0]
        except RefusedConversation:
            return None

    def _render(
        self, conversation: Conversation, length: int, *, asks: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            return self._render_once(conversation, length, asks, marked, self._arguments_are_texts)
        except DataError as error:
            first = error
        if any("tool_calls" in message for message in conversation.messages):  # some templates want arguments as a text
            try:
                rendered = self._render_once(conversation, length, asks, marked, not self._arguments_are_texts)
            except DataError:
                pass
            else:
                self._arguments_are_texts = not self._arguments_are_texts
                return rendered
        reason = str(first).partition(": ")[2] or str(first)
        raise RefusedConversation("refused by the template", f"is refused by the chat template ({reason})") from first

    def _render_once(
        self, conversation: Conversation, length: int, asks: bool, marked: bool, arguments_are_texts: bool
    ) -> tuple[str, list[Span]]:
        messages = conversation.messages[:length]
        if arguments_are_texts:
            messages = [_with_text_arguments(message) for message in messages]
        values = {**self._values, **(conversation.values or {})}
        if marked:
            return self._template.render_marked(messages, tools=conversation.tools, values=values)
        text = self._template.render(messages, tools=conversation.tools, add_generation_prompt=asks, values=values)
        return text, []


@dataclass(frozen=True, slots=True)
class _Probe:
    """Where the content of an answer ends, and what the template writes after it if no message follows."""

    place: int
    after_last: str


def shared_length(first: str, second: str) -> int:
    """Returns how many characters two texts begin with alike.

    >>> shared_length("abc", "abd"), shared_length("ab", "abc")
    (2, 2)
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(second[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _probed(message: Message, *, at_begin: bool) -> Message:
    """Returns a message with a character more, at the end of what it says or at its beginning."""
    content, calls = message["content"], message.get("tool_calls")
    if calls and not (at_begin and content):
        number = 0 if at_begin else len(calls) - 1
        function = calls[number]["function"]
        changed = {**calls[number], "function": {**function, "name": _with_probe(function["name"], at_begin)}}
        return {**message, "tool_calls": [*calls[:number], changed, *calls[number + 1 :]]}
    if at_begin and "</think>" in content:
        head, mark, tail = content.rpartition("</think>")
        kept = tail.lstrip("\n")
        return {**message, "content": head + mark + tail[: len(tail) - len(kept)] + _PROBE + kept}
    return {**message, "content": _with_probe(content, at_begin)}


def _with_probe(text: str, at_begin: bool) -> str:
    return _PROBE + text if at_begin else text + _PROBE


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_messages(conversation: Conversation, messages: list[Message]) -> Conversation:
    return Conversation(messages, conversation.weights, conversation.tools, conversation.values, conversation.first)


def _unclear(k: int, what: str) -> RefusedConversation:
    reason = f"has an answer, message {k + 1}, and where it {what} in the rendered conversation is unclear: {_FIX}"
    return RefusedConversation("unclear mask", reason)
