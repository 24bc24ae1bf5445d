"""A tokenizer's chat template: turns messages into the text that a chat model was trained on.

The template came with the model's files and is a program: it runs in jinja2's sandbox, which cannot reach Python's internals, change what
it is given, or name files. Requests supply values alone, never a template.

A template may mark what the model writes: `{% generation %}...{% endgeneration %}`, which transformers reads for its
`return_assistant_tokens_mask`. Marks are two characters that no message has, put around such a block while it is rendered, and taken out
of the text; so they are where the block's text ends up, whatever the template does with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.data.encoded_text import Span
from petatron.data.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 16
"""Published templates have some ten thousand; compiling one of this size takes half a second."""
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "eos_token"))
_MAX_SHOWN_CHARS = 300
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BEGIN, _END = "\U000fdcb0", "\U000fdcb1"
"""Characters for private use: no text has them, and no filter of jinja2 takes them for white space."""


class _GenerationBlocks(Extension):
    """Reads `{% generation %}` blocks, and puts marks around them in a rendering that asks for them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        arguments: list[nodes.Expr] = [nodes.ContextReference()]
        return nodes.CallBlock(self.call_method("mark", arguments), [], [], body).set_lineno(line)

    def mark(self, context: Context, caller: Callable[[], str]) -> str:
        text = caller()
        return f"{_BEGIN}{text}{_END}" if context.get(_MARKS_KEY) else text


_MARKS_KEY = "_marks_generation"


def split_marks(text: str) -> tuple[str, list[Span]]:
    """Returns a text without its marks, and what is between them; a block within another is part of it.

    >>> split_marks(f"a{_BEGIN}bc{_END}d")
    ('abcd', [(1, 3)])
    """
    parts: list[str] = []
    spans: list[Span] = []
    depth = length = begin = 0
    for piece in re.split(f"([{_BEGIN}{_END}])", text):
        if piece == _BEGIN:
            begin = length if not depth else begin
            depth += 1
        elif piece == _END:
            depth -= 1
            if not depth:
                spans.append((begin, length))
        else:
            parts.append(piece)
            length += len(piece)
    return "".join(parts), spans


class ChatTemplate:
    """Renders messages; `tool_use` is a second template of some tokenizers, for requests with tools.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        today: datetime | None = None,
    ) -> None:
        """`today` is the date that the template writes, where it writes one; None: that of the clock."""
        # Without optimization: it would compute constants such as 'a' * 10**10 when the template is only read.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks], optimized=False
        )
        # As templates expect it, and unlike jinja2's own: without HTML escapes.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)
        self.source = source
        self.tool_source = source if tool_use is None else tool_use
        self._special_tokens = dict(special_tokens or {})
        self._plain = _compile(environment, source)
        self._tool_use = self._plain if tool_use is None else _compile(environment, tool_use)

    @property
    def has_marks(self) -> bool:
        """Whether it says what the model writes."""
        return _MARK.search(self.source) is not None

    @property
    def writes_date(self) -> bool:
        return "strftime_now" in self.source + self.tool_source

    def sources(self) -> dict[str, Any]:
        """Returns what makes the same template elsewhere."""
        tool_use = None if self.tool_source is self.source else self.tool_source
        return {"source": self.source, "tool_use": tool_use, "special_tokens": self._special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt; raises `DataError` where the template refuses the messages."""
        return self._rendered(messages, tools, add_generation_prompt, values, {})

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Returns a conversation, and the characters of what its template marks as written by the model.

        >>> source = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        >>> ChatTemplate(source).render_marked([{"role": "assistant", "content": "Hi"}])
        ('assistant: Hi', [(11, 13)])
        """
        return split_marks(self._rendered(messages, tools, False, values, {_MARKS_KEY: True}))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        values: Mapping[str, Any] | None,
        marks: Mapping[str, bool],
    ) -> str:
        if taken := _RESERVED & set(values or ()):
            raise DataError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}. Use the request's own fields."
            )
        template = self._tool_use if tools else self._plain
        try:
            return template.render(
                **{
                    **self._special_tokens,
                    **(values or {}),
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    **marks,
                }
            )
        except Exception as error:  # a template is a program of others: it may raise anything
            why = printable(str(error), max_chars=_MAX_SHOWN_CHARS)
            raise DataError(f"The model's chat template refuses these messages: {why}") from error


def tokenizer_chat_template(tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """Returns the template of a tokenizer's files: chat_template.jinja, else that of tokenizer_config.json; None without one."""
    sources = template_sources(tokenizer)
    return None if sources is None else ChatTemplate(**sources)


def template_sources(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Returns what makes a tokenizer's template, as `ChatTemplate.sources` does; None without one."""
    files = {} if tokenizer is None else tokenizer.files()
    settings = tokenizer_settings(tokenizer)
    source, tool_use = settings.get("chat_template"), None
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, tool_use = named.get("default"), named.get("tool_use")
    if "chat_template.jinja" in files:
        source = files["chat_template.jinja"].decode(errors="replace")
    if not isinstance(source, str):
        return None
    special_tokens = {name: text for name in ("bos_token", "eos_token") if (text := special_token(settings, name))}
    return {
        "source": source,
        "tool_use": tool_use if isinstance(tool_use, str) else None,
        "special_tokens": special_tokens,
    }


def tokenizer_settings(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the content of a tokenizer's tokenizer_config.json."""
    content = None if tokenizer is None else tokenizer.files().get("tokenizer_config.json")
    settings = {} if content is None else json.loads(content)
    return settings if isinstance(settings, dict) else {}


def special_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Returns a special token of a tokenizer_config.json, which may be a text or an object with its content."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise DataError(f"The chat template has {len(source):,} characters. Use one of at most {MAX_TEMPLATE_CHARS:,}.")
    try:
        return environment.from_string(source)
    except Exception as error:  # besides its own errors, those of Python's compiler: too deep, too many digits
        why = printable(str(error), max_chars=_MAX_SHOWN_CHARS)
        raise DataError(
            f"The chat template cannot be read: {why}. Give another one with --chat-template FILE."
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
