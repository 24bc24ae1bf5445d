"""How a conversation becomes text: the chat formats of language models that vision-language models are built on.

They are those of the models' published chat templates, under the names of Megatron's `--tokenizer-prompt-format`. A format is data. From
it follow the text of a conversation, which part of it the model learns (what the assistant says, and the mark after it), and a chat
template for other programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from petatron.base.errors import DataError

ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a conversation's text, and whether the model learns to write it."""

    text: str
    is_target: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """The text around messages. `{bos}` and `{eos}` in it are the tokenizer's own; `{role}` is the message's.

    begin: before the first message. system: None where a system message has no place, and is left out. tokens: what must be a token of the
    vocabulary. pad: the token that fills up samples, or the role of one. default_system: what a conversation without a system message
    begins with. trims: white space around a message is dropped.
    """

    begin: str = ""
    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    tokens: tuple[str, ...]
    pad: str
    default_system: str | None = None
    trims: bool = False

    def around(self, role: str) -> tuple[str, str] | None:
        return {"system": self.system, "user": self.user, "assistant": self.assistant}[role]

    def segments(
        self,
        messages: Sequence[Message],
        *,
        named: Mapping[str, str],
        force_system_message: bool,
        add_generation_prompt: bool,
    ) -> list[Segment]:
        """Returns the text of a conversation in pieces. named: the texts of `{bos}` and `{eos}`."""
        check_messages(messages)
        segments = [Segment(_filled(self.begin, named))]
        for message in self._with_system(messages, force=force_system_message):
            around, content = self.around(message["role"]), message["content"]
            if around is not None:
                before, after = (_filled(text, named) for text in around)
                is_target = message["role"] == "assistant"
                segments += [Segment(before), Segment((content.strip() if self.trims else content) + after, is_target)]
        if add_generation_prompt:
            segments.append(Segment(_filled(self.assistant[0], named)))
        return segments

    def _with_system(self, messages: Sequence[Message], *, force: bool) -> list[Message]:
        has_system = messages[0]["role"] == "system"
        if self.default_system is None or (has_system and not force):
            return list(messages)
        return [{"role": "system", "content": self.default_system}, *messages[has_system:]]

    def chat_template(self) -> str:
        """Returns the same as a template of jinja2, for the tokenizer_config.json of a model's folder."""
        content = "message['content'] | trim" if self.trims else "message['content']"
        parts = [_as_jinja(self.begin)]
        if self.default_system is not None and self.system is not None:
            text = _as_jinja(f"{self.system[0]}{self.default_system}{self.system[1]}")
            parts.append("{%- if messages[0]['role'] != 'system' %}" + text + "{%- endif %}")
        parts.append("{%- for message in messages %}")
        for role in ROLES:
            if (around := self.around(role)) is not None:
                before, after = map(_as_jinja, around)
                parts += [
                    f"{{%- if message['role'] == '{role}' %}}",
                    before,
                    f"{{{{- {content} }}}}",
                    after,
                    "{%- endif %}",
                ]
        parts += ["{%- endfor %}", "{%- if add_generation_prompt %}", _as_jinja(self.assistant[0]), "{%- endif %}"]
        return "".join(parts)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises for messages that no format has a place for."""
    fix = "Give a list of messages {'role': ..., 'content': TEXT}, of the roles system (first), user and assistant."
    if not messages:
        raise DataError(f"A conversation has no messages. {fix}")
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            what = (
                f"has the role {role!r}" if role not in ROLES else f"has a content that is a {type(content).__name__}"
            )
            raise DataError(f"Message {number} of a conversation {what}. {fix}")
        if role == "system" and number:
            raise DataError(f"Message {number} of a conversation is a system message after others. {fix}")


def _filled(text: str, named: Mapping[str, str]) -> str:
    for name, token in named.items():
        text = text.replace(f"{{{name}}}", token)
    return text


def _as_jinja(text: str) -> str:
    """Returns expressions of a text; `{bos}` and `{eos}` are variables there."""
    if not text:
        return ""
    quoted = repr(text).replace("{bos}", "' + bos_token + '").replace("{eos}", "' + eos_token + '")
    return f"{{{{- {quoted} }}}}"


def _header(role: str) -> tuple[str, str]:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"


def _im(role: str) -> tuple[str, str]:
    return f"<|im_start|>{role}\n", "<|im_end|>\n"


def _chatml(*, pad: str, begin: str = "", default_system: str | None = None) -> PromptFormat:
    return PromptFormat(
        begin=begin,
        system=_im("system"),
        user=_im("user"),
        assistant=_im("assistant"),
        tokens=("<|im_start|>", "<|im_end|>"),
        pad=pad,
        default_system=default_system,
    )


PROMPT_FORMATS: Mapping[str, PromptFormat] = {
    "mistral": PromptFormat(
        begin="{bos}",
        system=None,
        user=("[INST] ", "[/INST]"),
        assistant=(" ", "{eos}"),
        tokens=(),
        pad="unk",
    ),
    "llama3": PromptFormat(
        begin="{bos}",
        system=_header("system"),
        user=_header("user"),
        assistant=_header("assistant"),
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        pad="<|end_of_text|>",
        trims=True,
    ),
    "chatml": _chatml(pad="pad"),
    "nvlm-yi-34b": _chatml(pad="pad", begin="{bos}"),
    "qwen2p0": _chatml(pad="<|endoftext|>", default_system="You are a helpful assistant."),
    "qwen2p5": _chatml(
        pad="<|endoftext|>",
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
}
