"""Reads a record of images and text, in the forms that published data has, into one form.

    {"image": "a.jpg", "text": "<image> a dog"}                            also "images": [...], and "caption" for "text"
    {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\n..."}, ...]}            LLaVA
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "..."}]}, ...]}     OpenAI
    {"video": ["0.jpg", "1.jpg"], "text": "<video> ..."}                   frames, a folder of them, or an animated file

`<image>` is where an image is shown, and `<video>` where a video is. Images without any tag are shown before the text, as most captions
mean it; the report counts them. Other numbers of tags than of images are errors: nothing says which is which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from petatron.data.image_text.record_error import RecordError
from petatron.data.multimodal.multimodal_tokenizer import IMAGE
from petatron.data.multimodal.prompt_formats import ROLES

VIDEO = "<video>"
_TAGS = re.compile(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}")
_LLAVA_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_TEXT_KEYS = ("text", "caption")
_MAX_VISUALS = 10_000


@dataclass(frozen=True, slots=True)
class Visual:
    """An image or a video: the name of its file or folder, or those of its frames."""

    kind: Literal["image", "video"]
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more frames"


@dataclass(frozen=True, slots=True)
class ImageTextRecord:
    """A text or a conversation, whose `<image>` tags are its visuals in their order. tags_added: they were put in front of it."""

    visuals: tuple[Visual, ...]
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    tags_added: bool = False


@dataclass(slots=True)
class _Visuals:
    """The visuals that a record names, and those that its tags have taken."""

    images: list[Visual]
    videos: list[Visual]
    shown: list[Visual]

    def tagged(self, text: str) -> str:
        """Returns a text with every tag an `<image>`, and takes the visuals of its tags."""

        def take(match: re.Match[str]) -> str:
            tag = match.group()
            of_kind = self.images if tag == IMAGE else self.videos
            if not of_kind:
                raise RecordError("tag without image", f"has a tag {tag} for which it names nothing")
            self.shown.append(of_kind.pop(0))
            return IMAGE

        return _TAGS.sub(take, text)

    def untagged(self) -> tuple[str, bool]:
        """Returns tags to put in front, where no text has any."""
        left = [*self.images, *self.videos]
        if not left:
            return "", False
        if self.shown:
            reason = f"names {len(left) + len(self.shown)} images and has {len(self.shown)} tags"
            raise RecordError("image without tag", reason)
        self.shown += left
        return IMAGE * len(left), True


def parse_line(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError("no json", f"is no JSON ({str(error)[:100]})") from error
    if not isinstance(record, dict):
        raise RecordError("wrong form", f"is a JSON {type(record).__name__}, and not an object")
    return record


def parse_record(record: Mapping[str, Any], *, images: Sequence[str] | None = None) -> ImageTextRecord:
    """Returns a record in one form; `images` are those that come with it, in place of those that it names (WebDataset).

    >>> parse_record({"image": "a.jpg", "text": "a dog"})
    ImageTextRecord(visuals=(Visual(kind='image', names=('a.jpg',)),), text='<image>a dog', messages=None, tags_added=True)
    """
    visuals = _Visuals(_named(record, "image", images), _named(record, "video", None), [])
    if "messages" in record:
        messages = [_message(message, visuals, images is not None) for message in _list_of(record, "messages")]
    elif "conversations" in record:
        messages = [_llava_message(message, visuals) for message in _list_of(record, "conversations")]
    else:
        text = next((record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str)), None)
        if text is None:
            raise RecordError("no text", f"has none of {', '.join(_TEXT_KEYS)}, conversations and messages")
        text = visuals.tagged(text)
        front, added = visuals.untagged()
        return ImageTextRecord(tuple(visuals.shown), text=front + text, tags_added=added)
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise RecordError("no text", "has no message of the assistant, which is what is learned")
    front, added = visuals.untagged()
    if added:
        place = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if place is None:
            raise RecordError(
                "image without tag", "has images, no tag for them, and no message of the user to show them in"
            )
        messages[place] = {"role": "user", "content": f"{front}\n{messages[place]['content']}"}
    return ImageTextRecord(tuple(visuals.shown), messages=tuple(messages), tags_added=added)


def _named(record: Mapping[str, Any], kind: Literal["image", "video"], given: Sequence[str] | None) -> list[Visual]:
    if given is not None:
        return [Visual(kind, (name,)) for name in given]
    value = record.get(kind, record.get(f"{kind}s"))
    if value is None:
        return []
    if isinstance(value, str):
        return [Visual(kind, (value,))]
    if kind == "video" and _is_names(value) and kind in record:
        return [Visual(kind, tuple(value))]
    if isinstance(value, list) and len(value) <= _MAX_VISUALS:
        return [_visual(kind, entry) for entry in value]
    raise RecordError("wrong form", f"has {kind}s that are no names of files")


def _visual(kind: Literal["image", "video"], value: object) -> Visual:
    if isinstance(value, str) and value:
        return Visual(kind, (value,))
    if kind == "video" and _is_names(value):
        return Visual(kind, tuple(value))
    raise RecordError("wrong form", f"has a {kind} that is no name of a file")


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and 0 < len(value) <= _MAX_VISUALS and all(isinstance(name, str) for name in value)


def _list_of(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record[key]
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise RecordError("wrong form", f"has {key} that are no list of objects")
    return value


def _llava_message(message: Mapping[str, Any], visuals: _Visuals) -> dict[str, str]:
    role, content = _LLAVA_ROLES.get(str(message.get("from"))), message.get("value")
    if role is None or not isinstance(content, str):
        raise RecordError("wrong form", "has a message that is not {'from': 'human' or 'gpt', 'value': TEXT}")
    return {"role": role, "content": visuals.tagged(content)}


def _message(message: Mapping[str, Any], visuals: _Visuals, is_given: bool) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RecordError("wrong form", f"has a message of the role {str(role)[:40]!r}, and not {', '.join(ROLES)}")
    if isinstance(content, str):
        return {"role": str(role), "content": visuals.tagged(content)}
    if not isinstance(content, list):
        raise RecordError("wrong form", "has a message whose content is neither a text nor a list")
    return {"role": str(role), "content": "".join(_content_part(part, visuals, is_given) for part in content)}


def _content_part(part: object, visuals: _Visuals, is_given: bool) -> str:
    """Returns the text of a part. A part that names its image is shown; one that does not takes the record's next image."""
    if isinstance(part, dict):
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            return visuals.tagged(part["text"])
        if kind in ("image", "image_url", "video"):
            named = None if is_given else _part_source(part, kind)
            if named is None:
                return visuals.tagged(VIDEO if kind == "video" else IMAGE)
            visuals.shown.append(_visual("video" if kind == "video" else "image", named))
            return IMAGE
    raise RecordError("wrong form", "has a part of a message that is neither text nor image")


def _part_source(part: Mapping[str, Any], kind: str) -> object:
    """Returns the file, folder or data URL that a part names; None if it names none."""
    for key in (kind, "image", "video", "path", "url"):
        value = part.get(key)
        if isinstance(value, dict):
            value = value.get("url")
        if value is not None:
            return value
    return None
