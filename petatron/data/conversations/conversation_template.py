"""The chat template that conversations are written by: the tokenizer's own, or a built-in one where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from petatron.data.prompt.built_in_templates import (
    built_in_template,
    default_template,
    end_texts,
    named_tokens,
    special_texts,
)
from petatron.data.prompt.chat_template import ChatTemplate, tokenizer_chat_template
from petatron.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ConversationTemplate:
    """A template by its text, which processes that encode make their own of.

    tokens: texts that are a token each. ends: those of them that are special.
    """

    source: str
    tool_use: str | None
    special_tokens: tuple[tuple[str, str], ...]
    tokens: tuple[str, ...]
    ends: tuple[str, ...]

    def of_date(self, today: datetime) -> ChatTemplate:
        return ChatTemplate(self.source, tool_use=self.tool_use, special_tokens=dict(self.special_tokens), today=today)


def conversation_template(tokenizer: Tokenizer) -> ConversationTemplate:
    """Returns the tokenizer's own template, else the built-in one that suits it."""
    template = tokenizer_chat_template(tokenizer)
    if template is None:
        name = default_template(tokenizer)
        template = ChatTemplate(built_in_template(name, tokenizer), special_tokens=named_tokens(tokenizer))
    sources = template.sources()
    named = tuple(sorted(sources["special_tokens"].items()))
    return ConversationTemplate(
        sources["source"], sources["tool_use"], named, special_texts(tokenizer), end_texts(tokenizer)
    )
