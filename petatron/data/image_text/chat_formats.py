"""The formats of conversations about images: those of language models (`multimodal/prompt_formats.py`), LLaVA's and SmolVLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from petatron.base.errors import DataError
from petatron.data.multimodal.multimodal_tokenizer import IMAGE
from petatron.data.multimodal.prompt_formats import PROMPT_FORMATS, PromptFormat, Segment
from petatron.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A format, and whether a space is before a message that does not begin with an image (SmolVLM)."""

    format: PromptFormat
    space_before_text: bool = False

    def segments(
        self, messages: Sequence[Mapping[str, str]], named: Mapping[str, str], *, force_system: bool
    ) -> list[Segment]:
        if self.space_before_text:
            messages = [
                {
                    **message,
                    "content": message["content"] if message["content"].startswith(IMAGE) else f" {message['content']}",
                }
                for message in messages
            ]
        return self.format.segments(
            messages, named=named, force_system_message=force_system, add_generation_prompt=False
        )

    def chat_template(self, *, image_begins: str) -> str:
        """Returns the same as a template of jinja2, of messages in which what stands for an image begins with `image_begins`."""
        template, content = self.format.chat_template(), "message['content']"
        if not self.space_before_text:
            return template
        spaced = f"({content} if {content}.startswith({image_begins!r}) else ' ' ~ {content})"
        return template.replace(f"{{{{- {content} }}}}", f"{{{{- {spaced} }}}}")


_VICUNA = PromptFormat(
    begin="{bos}",
    system=("", " "),
    user=("USER: ", " "),
    assistant=("ASSISTANT: ", "{eos}"),
    tokens=(),
    pad="unk",
    default_system=(
        "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite "
        "answers to the human's questions."
    ),
)
_SMOLVLM = PromptFormat(
    begin="<|im_start|>",
    system=("System:", "<end_of_utterance>\n"),
    user=("User:", "<end_of_utterance>\n"),
    assistant=("Assistant:", "<end_of_utterance>\n"),
    tokens=("<|im_start|>", "<end_of_utterance>"),
    pad="pad",
)
CHAT_FORMATS: Mapping[str, ChatFormat] = {
    **{name: ChatFormat(prompt_format) for name, prompt_format in PROMPT_FORMATS.items()},
    "vicuna": ChatFormat(_VICUNA),
    "smolvlm": ChatFormat(_SMOLVLM, space_before_text=True),
}


def named_tokens(chat: ChatFormat, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the texts of `{bos}` and `{eos}`; raises `DataError` for one that the format has and the tokenizer names not."""
    ids = {"eos": tokenizer.eod, "bos": tokenizer.bod, **tokenizer.special_ids}
    names: dict[str, str] = {}
    for role in ("bos", "eos"):
        number = ids.get(role)
        if number is not None:
            names[role] = tokenizer.decode([number])
        elif f"{{{role}}}" in repr(chat.format):
            raise DataError(
                f"The chat format needs a token of the role {role}, and {tokenizer.name} names none. Name it in the "
                "tokenizer_config.json, or choose another chat_format."
            )
    return names
