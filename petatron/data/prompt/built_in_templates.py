"""Built-in chat templates, and a tokenizer that has one instead of its own.

Each marks what the assistant writes. `nemotron-nano-v2`, `nemotron-h-aligned` and `identity` write what Megatron's
`--sft-tokenizer-prompt-format` of these names does.
"""

from __future__ import annotations

import json
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.config.schema.sections.chat_template import CHATML as CHATML_NAME
from petatron.config.schema.sections.chat_template import IDENTITY, NEMOTRON_ALIGNED, NEMOTRON_NANO
from petatron.config.schema.sections.chat_template import PLAIN as PLAIN_NAME
from petatron.data.data_file_error import data_file_error
from petatron.data.prompt.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, special_token, tokenizer_settings
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
_NANO = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<SPECIAL_11>Assistant\\n' }}"
    "{%- generation %}{{- message.content.strip() + '\\n<SPECIAL_12>\\n' }}{%- endgeneration %}"
    "{%- else %}{%- set content = message.content.replace('/think', '').replace('/no_think', '').strip() %}"
    "{%- if message.role == 'system' %}{{- '<SPECIAL_10>System\\n' + content + '\\n' }}"
    "{%- elif message.role == 'user' %}{{- '<SPECIAL_11>User\\n' + content + '\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\\n' }}{%- endif %}"
)
_ALIGNED = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content.strip() + '\\n' }}{%- endgeneration %}"
    "{%- elif message.role == 'system' %}{{- '<SPECIAL_10>System\\n' + message.content.strip() + '\\n' }}"
    "{%- elif message.role == 'user' %}{{- '<SPECIAL_11>User\\n' + message.content.strip() + '\\n<SPECIAL_11>Assistant\\n' }}"
    "{%- endif %}{%- endfor %}"
)
_IDENTITY = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{%- generation %}{{- message.content }}{%- endgeneration %}"
    "{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"
)
BUILT_IN = {
    CHATML_NAME: CHATML,
    PLAIN_NAME: PLAIN,
    NEMOTRON_NANO: _NANO,
    NEMOTRON_ALIGNED: _ALIGNED,
    IDENTITY: _IDENTITY,
}
TEMPLATE_FILE = "chat_template.jinja"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_BOS = "{{- bos_token }}"


def with_chat_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """Returns a tokenizer whose files have another chat template: that of a file, or a built-in one; the same one without any."""
    if template is None:
        return tokenizer
    source = built_in_template(template, tokenizer) if template in BUILT_IN else _read_template(Path(template))
    return with_template_source(tokenizer, source)


def with_template_source(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """Returns a tokenizer whose files have a chat template."""
    changed = copy(tokenizer)
    setattr(changed, "files", partial(_files_with_template, tokenizer, source))  # noqa: B010  of any class
    return changed


def built_in_template(name: str, tokenizer: Tokenizer) -> str:
    """Returns a built-in template for a tokenizer; it begins with the token that the tokenizer puts before a text, if it does."""
    return (_BOS if surrounding_ids(tokenizer)[0] and "bos_token" in named_tokens(tokenizer) else "") + BUILT_IN[name]


def default_template(tokenizer: Tokenizer) -> str:
    """Returns the name of the built-in template of a tokenizer without one."""
    return CHATML_NAME if set(_CHATML_TOKENS) <= set(special_texts(tokenizer)) else PLAIN_NAME


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the texts that are one token each whatever is around them: markers of roles, of tool calls, and ends of turns."""
    return _texts(tokenizer, _added_tokens(tokenizer))


def end_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns those that the tokenizer calls special, as ends of turns are; markers within an answer mostly are not."""
    return _texts(tokenizer, [token for token in _added_tokens(tokenizer) if token.get("special")])


def _texts(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> tuple[str, ...]:
    texts = {token["content"] for token in added if isinstance(token.get("content"), str)}
    return tuple(sorted(texts | set(named_tokens(tokenizer).values())))


def _added_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    content = vocabulary_json(tokenizer)
    return [] if content is None else json.loads(content).get("added_tokens") or []


def named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the texts of the tokens that templates read by name."""
    settings = tokenizer_settings(tokenizer)
    return {name: text for name in ("bos_token", "eos_token") if (text := special_token(settings, name))}


def _files_with_template(tokenizer: Tokenizer, source: str) -> dict[str, bytes]:
    return {**tokenizer.files(), TEMPLATE_FILE: source.encode()}


def _read_template(path: Path) -> str:
    with reading_untrusted(path, data_file_error):
        source = read_limited_bytes(path, 4 * MAX_TEMPLATE_CHARS).decode()
    try:
        ChatTemplate(source)
    except DataError as error:
        raise DataError(f"--chat-template {path}: {error}") from error
    return source
