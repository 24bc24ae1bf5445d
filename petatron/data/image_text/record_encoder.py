"""Makes token ids of a record: its text in a chat format, with every image written as its family writes it.

The text is encoded as a whole, with one placeholder for each part of an image, since tokenizers treat what follows a special token in ways
of their own; then each placeholder is repeated for all its features. A tokenizer that has no placeholder (`plain` alone allows it) encodes
the texts between images one by one.

What is learned is the text of captions and of the assistant, with what ends it. The tokens of images, and what is written around them, are
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.encoded_text import EncodedText, Span
from petatron.data.image_text.chat_formats import CHAT_FORMATS, ChatFormat, named_tokens
from petatron.data.image_text.image_markup import IMAGE_MARKUPS, ImageMarkup
from petatron.data.image_text.image_text_record import ImageTextRecord
from petatron.data.image_text.record_error import RecordError
from petatron.data.images.image_policies import ImageLayout
from petatron.data.images.patch_grid import PatchGrid
from petatron.data.multimodal.multimodal_tokenizer import IMAGE, MultimodalTokenizer
from petatron.data.multimodal.prompt_formats import Segment
from petatron.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """The ids of a sample, which of them are learned, and where each visual begins and ends among them, with what is around it."""

    ids: NDArray[np.int64]
    is_target: NDArray[np.bool_]
    visuals: list[Span]

    def cut(self, length: int) -> EncodedRecord:
        """Returns the first `length` ids and one to predict; an image that would not be among them is left out, with all that follows."""
        if len(self.ids) <= length + 1:
            return self
        end, kept = length + 1, list[Span]()
        for begin, stop in self.visuals:
            if stop > length:
                end = min(end, begin)
                break
            kept.append((begin, stop))
        return EncodedRecord(self.ids[:end], self.is_target[:end], kept)

    def first(self, length: int) -> EncodedRecord:
        """Returns the first `length` ids; no image is among those after."""
        return (
            self if len(self.ids) <= length else EncodedRecord(self.ids[:length], self.is_target[:length], self.visuals)
        )

    def without_visuals_from(self, number: int) -> EncodedRecord:
        """Returns what is before a visual."""
        begin = self.visuals[number][0]
        return EncodedRecord(self.ids[:begin], self.is_target[:begin], self.visuals[:number])


@dataclass(slots=True)
class _Writing:
    """A text as it is written: whether each character is learned, its placeholders, and where its visuals are."""

    text: str
    is_target: list[bool]
    placeholders: list[int]
    num_parts: list[int]
    visuals: list[Span]

    def add(self, text: str, is_target: bool) -> None:
        self.text += text
        self.is_target += [is_target] * len(text)

    def add_visual(self, markup: ImageMarkup, layout: ImageLayout) -> None:
        written, parts = markup.written(layout)
        begin = len(self.text)
        place = written.find(markup.placeholder)
        while place >= 0:
            self.placeholders.append(begin + place)
            place = written.find(markup.placeholder, place + len(markup.placeholder))
        self.num_parts += parts
        self.add(written, False)
        self.visuals.append((begin, len(self.text)))


class RecordEncoder:
    """Encodes records for one model: its tokenizer, its placeholder and its formats."""

    def __init__(self, tokenizer: Tokenizer, grid: PatchGrid, *, markup: str, chat_format: str | None) -> None:
        """`chat_format` None: records are texts alone. A MultimodalTokenizer has a format and tags of its own, which are used then."""
        self._tokenizer, self._grid, self._force_system = tokenizer, grid, False
        self._markup = IMAGE_MARKUPS[markup]
        if isinstance(tokenizer, MultimodalTokenizer):
            options = tokenizer.options
            self._force_system = options.force_system_message
            chat_format = chat_format or options.prompt_format
            if markup == "plain" and options.image_tag_type != "none":
                self._markup = IMAGE_MARKUPS[options.image_tag_type]
        self._chat: ChatFormat | None = None if chat_format is None else CHAT_FORMATS[chat_format]
        self._named = {} if self._chat is None else named_tokens(self._chat, tokenizer)
        encoded = self._encode_written(self._markup.placeholder).ids
        self._has_placeholder = encoded == [grid.image_token_id]
        if not self._has_placeholder and (len(encoded) == 1 or self._markup != IMAGE_MARKUPS["plain"]):
            is_token = f"has the id {encoded[0]}" if len(encoded) == 1 else f"is {len(encoded)} tokens, and not one"
            raise DataError(
                f"{self._markup.placeholder} {is_token} in {tokenizer.name}, and --image-token-id is {grid.image_token_id}. Give the id of "
                "the token that stands for an image, or another image_markup."
            )

    def encode(
        self, record: ImageTextRecord, features: Sequence[Sequence[int]], layouts: Sequence[ImageLayout]
    ) -> EncodedRecord:
        """Encodes a record, whose visuals have layouts, and features for each part."""
        writing = self._written(record, layouts)
        ids, spans, counts = self._repeated(writing, features)
        is_placeholder = ids == self._grid.image_token_id
        learned = np.array([*writing.is_target, False])
        last = np.where(spans[:, 1] > spans[:, 0], spans[:, 1] - 1, spans[:, 0])
        is_target = learned[last] & ~is_placeholder
        ends = np.cumsum(counts)
        places = np.concatenate([[0], ends])
        visuals = [
            (int(places[np.searchsorted(spans[:, 0], begin)]), int(places[np.searchsorted(spans[:, 0], stop)]))
            for begin, stop in writing.visuals
        ]
        before = [] if record.messages is not None or self._tokenizer.bod is None else [self._tokenizer.bod]
        after = [] if record.messages is not None or self._tokenizer.eod is None else [self._tokenizer.eod]
        return EncodedRecord(
            np.concatenate([before, np.repeat(ids, counts), after]).astype(np.int64),
            np.concatenate([np.zeros(len(before), bool), np.repeat(is_target, counts), np.ones(len(after), bool)]),
            [(begin + len(before), stop + len(before)) for begin, stop in visuals],
        )

    def prompt_ids(
        self, texts: Sequence[str], features: Sequence[Sequence[int]], layouts: Sequence[ImageLayout]
    ) -> list[int]:
        """Returns the ids of a prompt: texts before, between and after its images."""
        writing = _Writing("", [], [], [], [])
        for number, text in enumerate(texts):
            if number:
                writing.add_visual(self._markup, layouts[number - 1])
            writing.add(text, False)
        ids, _, counts = self._repeated(writing, features)
        return np.repeat(ids, counts).tolist()

    def _repeated(
        self, writing: _Writing, features: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids of a text, the characters of each, and how often each is repeated for the features of its part."""
        encoded = self._encode(writing)
        ids, spans = np.array(encoded.ids, np.int64), np.array(encoded.spans, np.int64).reshape(-1, 2)
        is_placeholder = ids == self._grid.image_token_id
        if spans[is_placeholder, 0].tolist() != writing.placeholders:
            reason = f"has the image token {self._markup.placeholder} in a text, where no image is"
            raise RecordError("image token in text", reason)
        counts = np.ones(len(ids), np.int64)
        counts[is_placeholder] = _features_of_placeholders(writing.num_parts, features)
        return ids, spans, counts

    def _written(self, record: ImageTextRecord, layouts: Sequence[ImageLayout]) -> _Writing:
        writing, left = _Writing("", [], [], [], []), list(layouts)
        for segment in self._segments(record):
            for number, text in enumerate(segment.text.split(IMAGE)):
                if number:
                    writing.add_visual(self._markup, left.pop(0))
                writing.add(text, segment.is_target)
        return writing

    def _segments(self, record: ImageTextRecord) -> list[Segment]:
        if record.messages is None:
            return [Segment(record.text or "", True)]
        if self._chat is None:
            raise RecordError("wrong form", "is a conversation, and no chat_format says how one is written")
        try:
            return self._chat.segments(record.messages, self._named, force_system=self._force_system)
        except DataError as error:
            raise RecordError("wrong form", str(error).removesuffix(".")) from error

    def _encode(self, writing: _Writing) -> EncodedText:
        if self._has_placeholder:
            return self._encode_written(writing.text)
        ids: list[int] = []
        spans: list[Span] = []
        end, size = 0, len(self._markup.placeholder)
        for place in [*writing.placeholders, len(writing.text)]:
            encoded = self._encode_written(writing.text[end:place])
            ids += encoded.ids
            spans += [(end + first, end + last) for first, last in encoded.spans]
            if place < len(writing.text):
                ids.append(self._grid.image_token_id)
                spans.append((place, place + size))
            end = place + size
        return EncodedText(ids, spans)

    def _encode_written(self, text: str) -> EncodedText:
        if isinstance(self._tokenizer, MultimodalTokenizer):
            return self._tokenizer.encode_written(text)
        return self._tokenizer.encode_with_offsets(text)


def _features_of_placeholders(num_parts: Sequence[int], features: Sequence[Sequence[int]]) -> list[int]:
    """Returns the features of each placeholder, which stands for some of the parts."""
    of_parts = [count for visual in features for count in visual]
    counts, begin = [], 0
    for parts in num_parts:
        counts.append(sum(of_parts[begin : begin + parts]))
        begin += parts
    return counts
