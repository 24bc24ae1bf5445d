"""The chat template that conversations are written by: the tokenizer's own, or a built-in one where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from petatron.data.prompt.built_in_templates import (
    built_in_template,
    default_template,
    end_texts,
    named_tokens,
    special_texts,
)
from petatron.data.prompt.chat_template import ChatTemplate, template_sources
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
        return _compiled(self, today)


@lru_cache(maxsize=8)
def _compiled(template: ConversationTemplate, today: datetime) -> ChatTemplate:
    """Compiles a template once for all sources of a run."""
    return ChatTemplate(
        template.source, tool_use=template.tool_use, special_tokens=dict(template.special_tokens), today=today
    )


def conversation_template(tokenizer: Tokenizer) -> ConversationTemplate:
    """Returns the tokenizer's own template, else the built-in one that suits it."""
    sources = template_sources(tokenizer)
    if sources is None:
        source = built_in_template(default_template(tokenizer), tokenizer)
        sources = {"source": source, "tool_use": None, "special_tokens": named_tokens(tokenizer)}
    named = tuple(sorted(sources["special_tokens"].items()))
    return ConversationTemplate(
        sources["source"], sources["tool_use"], named, special_texts(tokenizer), end_texts(tokenizer)
    )
