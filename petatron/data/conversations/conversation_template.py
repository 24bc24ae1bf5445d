"""The chat template that conversations are written by: the tokenizer's own, or a built-in one where it has none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from petatron.data.prompt.chat_template import ChatTemplate, special_token, tokenizer_chat_template, tokenizer_settings
from petatron.data.prompt.prompt_encoder import surrounding_ids
from petatron.data.tokenizer import Tokenizer, vocabulary_json

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Of tokenizers that have its tokens."""
PLAIN = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- 'Assistant:' }}"
    "{%- generation %}{{- ' ' + message.content }}{{- eos_token }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- 'User: ' + message.content + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"
)
"""Of all others: a dialogue as plain text, whose answers end with the end-of-text token."""
BUILT_IN = {"chatml": CHATML, "plain": PLAIN}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_BOS = "{{- bos_token }}"


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
        template = ChatTemplate(built_in_template(name, tokenizer), special_tokens=_named_tokens(tokenizer))
    sources = template.sources()
    named = tuple(sorted(sources["special_tokens"].items()))
    return ConversationTemplate(
        sources["source"], sources["tool_use"], named, special_texts(tokenizer), end_texts(tokenizer)
    )


def default_template(tokenizer: Tokenizer) -> str:
    """Returns the name of the built-in template of a tokenizer without one."""
    return "chatml" if set(_CHATML_TOKENS) <= set(special_texts(tokenizer)) else "plain"


def built_in_template(name: str, tokenizer: Tokenizer) -> str:
    """Returns a built-in template for a tokenizer; it begins with the token that the tokenizer puts before a text, if it does."""
    return (_BOS if surrounding_ids(tokenizer)[0] and "bos_token" in _named_tokens(tokenizer) else "") + BUILT_IN[name]


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the texts that are one token each whatever is around them: markers of roles, of tool calls, and ends of turns."""
    return _texts(tokenizer, _added_tokens(tokenizer))


def end_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns those that the tokenizer calls special, as ends of turns are; markers within an answer mostly are not."""
    return _texts(tokenizer, [token for token in _added_tokens(tokenizer) if token.get("special")])


def _texts(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> tuple[str, ...]:
    texts = {token["content"] for token in added if isinstance(token.get("content"), str)}
    return tuple(sorted(texts | set(_named_tokens(tokenizer).values())))


def _added_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    content = vocabulary_json(tokenizer)
    return [] if content is None else json.loads(content).get("added_tokens") or []


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    settings = tokenizer_settings(tokenizer)
    return {name: text for name in ("bos_token", "eos_token") if (text := special_token(settings, name))}
