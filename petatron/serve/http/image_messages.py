"""Messages with images, as chat templates read them.

Some templates write the parts of a message, and the model's own placeholder for an image; they get every message in parts. Others write
texts: there an image is a mark in the text, which no request can know.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from petatron.data.image_text.image_prompt import MARK_BEGINS
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.image_parts import writes_parts
from petatron.serve.http.openai_requests import ChatMessage, ImagePart, TextPart
from petatron.serve.served_model_properties import ModelCard


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The text of a chat, with one placeholder for each image, and the texts around these."""

    text: str
    around_images: tuple[str, ...]


class MessageWriter:
    """Gives the contents of one request's messages to the template of a model, and finds its images in what that writes."""

    def __init__(self, model: ModelCard) -> None:
        self._prompts = None if isinstance(model.images, str) else model.images
        template = model.chat_template
        self._in_parts = self._prompts is not None and model.has_chat_template and writes_parts(template.source)
        self._mark = f"{MARK_BEGINS}{secrets.token_hex(8)}\ue001"

    def content(self, message: ChatMessage) -> str | list[dict[str, str]] | None:
        """Returns what the template gets for the content of a message."""
        content = message.content
        if self._in_parts:
            parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content or []
            return [_plain_part(part) for part in parts]
        if isinstance(content, list):
            return "".join(part.text if isinstance(part, TextPart) else self._mark for part in content)
        return content

    def split(self, text: str, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """Returns the prompt that a template has written; raises `ApiError` where its images cannot be found."""
        num_images = sum(
            isinstance(part, ImagePart)
            for message in messages
            if isinstance(message.content, list)
            for part in message.content
        )
        if self._prompts is None or not num_images:
            return ChatPrompt(text, (text,))
        placeholder = self._prompts.placeholder
        if self._in_parts:
            if any(placeholder in text for text in _texts(messages)):
                why = f"A text has {placeholder}, which stands for an image here. Leave it out: images are parts of their own."
                raise ApiError(400, why, param="messages")
            around = self._prompts.split(text)
        else:
            around = text.split(self._mark)
        if len(around) != num_images + 1:
            why = (
                f"The model's chat template writes {len(around) - 1} images of {num_images}. Start the server with a --chat-template that "
                "writes each image of a message."
            )
            raise ApiError(400, why, param="messages")
        return ChatPrompt(placeholder.join(around), tuple(around))


def _plain_part(part: Any) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


def _texts(messages: Sequence[ChatMessage]) -> list[str]:
    contents = [message.content for message in messages]
    texts = [content for content in contents if isinstance(content, str)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return texts + [part.text for part in parts if isinstance(part, TextPart)]
