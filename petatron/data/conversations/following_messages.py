"""What a chat template writes between an answer that is there as token ids and the next one: messages that follow it, and the invitation.

Rendering a conversation again writes earlier answers as the template would have, which are other tokens than those that were drawn:
other merges, reasoning that is left out, arguments of calls in another order. Here the ids that are there stay, and only what follows
is rendered, behind an answer of our own in the place of the last one:

    <|im_start|>assistant\\nb|<|im_end|>\\n<|im_start|>tool\\n7<|im_end|>\\n<|im_start|>assistant\\n
                            ^ from here on

An answer that ended with the token that ends a turn has it already; one that was cut off gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petatron.base.errors import DataError
from petatron.data.conversations.answer_spans import AnswerFinder
from petatron.data.conversations.conversation_record import ASSISTANT, Conversation
from petatron.data.conversations.conversation_settings import ConversationSettings
from petatron.data.conversations.conversation_template import conversation_template
from petatron.data.tokenizer import Tokenizer

_CALL = {"id": "000000000", "type": "function", "function": {"name": "c", "arguments": {}}}


class FollowingMessages:
    """Encodes messages that follow answers, by a tokenizer's template. tools: those that the model may call."""

    def __init__(self, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        template = conversation_template(tokenizer)
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools] if tools else None
        self._finder = AnswerFinder(template.of_date(ConversationSettings().today), {}, template.tokens, template.ends)

    def encode(self, answer_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids that follow those of an answer, up to where the next begins; `DataError` if the template refuses messages."""
        ids = self._tokenizer.encode(self.text(messages))
        return ids[1:] if answer_ids and ids and answer_ids[-1] == ids[0] else ids

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text after the content of an answer: the end of its turn, the messages, and the invitation to the next answer."""
        called = any(message.get("role") == "tool" for message in messages)
        answer = (
            {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]} if called else {"role": ASSISTANT, "content": "b"}
        )
        turns = [{"role": "user", "content": "a"}, answer, *(dict(message) for message in messages)]
        conversation = Conversation(turns, [1.0] * len(turns), self._tools)
        rendered, prompt = self._finder.render(conversation), self._finder.prompt(conversation, len(turns))
        begin, end = rendered.answers[0].span
        content = rendered.text[begin:end]
        if not prompt.startswith(rendered.text[:end]):
            raise DataError(
                "The chat template writes an answer differently before an invitation. Use texts as observations."
            )
        token = self._finder.end_of_turn(content)
        return prompt[begin + (len(content.rstrip()) if token is None else content.rfind(token)) :]
