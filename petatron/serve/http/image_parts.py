"""The images of chat messages: data URLs, read within the server's limits, beside the event loop and the engine.

An image comes from whoever may send a request. Its bytes, its pixels (by its header, before any is decoded), the number of images and the
patches of all of them are bounded; formats are those of OpenAI's API; nothing is fetched: a URL of another kind is refused. A few threads
of their own decode, so that what they need at once is bounded too, and texts of other requests do not wait for them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from petatron.base.errors import DataError
from petatron.data.image_text.image_prompt import ImagePrompts
from petatron.data.image_text.visual_reader import VisualSize
from petatron.data.images.decode_image import ImageLimits
from petatron.infer.prompt_images import PromptImages
from petatron.serve.http.api_error import ApiError
from petatron.serve.http.openai_requests import ChatMessage, ImagePart
from petatron.serve.serve_options import ServeLimits
from petatron.serve.served_model_properties import ModelCard

_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]{1,32})?(?:;[a-z0-9=.-]{1,64})*;base64,", re.IGNORECASE)
_THREADS = 4
_PARAM = "messages"
_WRITES_PARTS = re.compile(r"""['"]image['"]""")
_pool = ThreadPoolExecutor(_THREADS, "petatron-images")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MeasuredImages:
    """The images of a request, of which the headers have been read: their bytes, names and sizes."""

    prompts: ImagePrompts
    limits: ImageLimits
    names: tuple[str, ...]
    contents: tuple[bytes, ...]
    sizes: tuple[VisualSize, ...]

    async def read(self) -> PromptImages:
        """Decodes them; raises `ApiError` for one that cannot be."""
        pairs = zip(self.contents, self.names, strict=True)
        read = [_in_pool(self.prompts.read, content, self.limits, name=name) for content, name in pairs]
        parts = await asyncio.gather(*read)
        patches, grids = zip(*parts, strict=True)
        return PromptImages(np.concatenate(patches), np.concatenate(grids))

    async def encode(self, texts: Sequence[str]) -> list[int]:
        """Returns the ids of a prompt with texts around them."""
        return await asyncio.to_thread(_as_api_error, self.prompts.encode, texts, self.sizes)


async def measure_images(
    messages: Sequence[ChatMessage], model: ModelCard, limits: ServeLimits
) -> MeasuredImages | None:
    """Returns the images of messages; None without any. Raises `ApiError` for those that are not taken."""
    parts = [
        (f"messages.{number}.content.{place}", part)
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    if not parts:
        return None
    if isinstance(model.images, str):
        raise ApiError(400, model.images, param=_PARAM, code="images_not_supported")
    if len(parts) > limits.max_images:
        text = f"The request has {len(parts)} images, more than the {limits.max_images} that one may have."
        raise ApiError(400, text, param=_PARAM, code="too_many_images")
    bounds = ImageLimits(max_pixels=limits.max_image_pixels, max_bytes=limits.max_image_bytes)
    names = tuple(f"Image {number} ({path})" for number, (path, _) in enumerate(parts, 1))
    contents = [
        await asyncio.to_thread(_content_of, part.source, name, bounds) for name, (_, part) in zip(names, parts)
    ]
    sizes = [await _in_pool(model.images.measure, content, bounds, name=name) for name, content in zip(names, contents)]
    _as_api_error(model.images.check_patches, sizes)
    num_tokens, most = model.images.num_tokens(sizes), model.max_prompt_tokens
    if num_tokens > most:
        text = (
            f"The images are {num_tokens} tokens, and this server takes {most} of a prompt. Send fewer or smaller ones."
        )
        raise ApiError(400, text, param=_PARAM, code="context_length_exceeded")
    return MeasuredImages(model.images, bounds, names, tuple(contents), tuple(sizes))


def _content_of(url: str, name: str, limits: ImageLimits) -> bytes:
    """Returns the bytes of a data URL."""
    match = _DATA_URL.match(url[:256])
    if match is None:
        kind = re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,15}:", url)
        given = (
            f"a URL of {kind[0]}"
            if kind and not url.lower().startswith("data:")
            else "no data URL of an image in base64"
        )
        text = (
            f"{name} is {given}. This server fetches nothing: send the image itself, as data:image/png;base64,... "
            "(JPEG, PNG, WebP or GIF)."
        )
        raise ApiError(400, text, param=_PARAM, code="invalid_image_url")
    size = (len(url) - match.end()) * 3 // 4 - url[-2:].count("=")
    if size > limits.max_bytes:
        text = f"{name} has {size:,} bytes, and an image may have {limits.max_bytes:,}."
        raise ApiError(400, text, param=_PARAM, code="image_too_large")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        text = f"{name} is not valid base64. Encode all bytes of the file, without line breaks."
        raise ApiError(400, text, param=_PARAM, code="invalid_base64") from None


async def _in_pool(call: Callable[..., Result], *given: Any, **named: Any) -> Result:
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: _as_api_error(call, *given, **named))


def _as_api_error(call: Callable[..., Result], *given: Any, **named: Any) -> Result:
    try:
        return call(*given, **named)
    except DataError as error:
        raise ApiError(400, str(error), param=_PARAM, code="invalid_image") from error


def writes_parts(source: str) -> bool:
    """Whether a chat template writes the parts of messages, and images among them; others write texts alone."""
    return _WRITES_PARTS.search(source) is not None
