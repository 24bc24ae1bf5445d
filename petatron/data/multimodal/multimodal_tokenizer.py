"""Megatron's MultimodalTokenizer: any other tokenizer with a token for images, and conversations of which the assistant's part is learned.

`<image>` in a text is one id, a placeholder that a vision-language model fills with an image. Tags may be put around it
(`--image-tag-type`). A conversation is written in a prompt format and encoded as a whole, since tokens may reach over the borders of
messages; which tokens are the assistant's follows from the spans of their characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken

from petatron.base.errors import DataError
from petatron.data.encoded_text import EncodedText, Span
from petatron.data.multimodal.prompt_formats import PROMPT_FORMATS, Message, PromptFormat
from petatron.data.special_tokens import find_sentinels
from petatron.data.stored_tokenizer_options import OPTIONS_KEY
from petatron.data.tokenizer_fingerprint import TokenizerFingerprint, hash_of
from petatron.data.tokenizers_library import load_fast

if TYPE_CHECKING:
    from petatron.data.tokenizer import Tokenizer

IMAGE = "<image>"
IMAGE_TAGS: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "nvlm": ("<Image>", "</Image>"),
    "internvl": ("<img>", "</img>"),
}
STORED_KEY = "multimodal"
"""Where a folder's tokenizer_config.json has the options, among ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalOptions:
    """What is added to a tokenizer.

    prompt_format: a name of `PROMPT_FORMATS`; None for texts alone. special_tokens: tokens to add where the vocabulary does not have them.
    image_tag_type: a name of `IMAGE_TAGS`. force_system_message: a conversation's own system message gives way to the format's.
    """

    prompt_format: str | None = None
    special_tokens: tuple[str, ...] = (IMAGE,)
    image_tag_type: str = "none"
    force_system_message: bool = False


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """The ids of a conversation, of which of them the model learns to predict, and how many are images.

    A loss mask is of labels, which are the next tokens: that of position i is is_target[i + 1].
    """

    ids: list[int]
    is_target: list[bool]
    num_images: int


class MultimodalTokenizer:
    """Another tokenizer, with an image token and conversations. vocabulary: a tokenizer.json with the other's ids."""

    def __init__(self, base: Tokenizer, options: MultimodalOptions, *, vocabulary: bytes | None) -> None:
        if vocabulary is None:
            raise DataError(f"A MultimodalTokenizer needs the tokens of {base.name}, which has none. Name another one.")
        if IMAGE not in options.special_tokens or "" in options.special_tokens:
            named = " ".join(options.special_tokens)
            raise DataError(f"--special-tokens {named} has no {IMAGE}, or an empty token. Name {IMAGE} and others.")
        self.base, self.options = base, options
        self._vocabulary = vocabulary
        known = load_fast(vocabulary).get_vocab(with_added_tokens=True)
        new = [token for token in dict.fromkeys(options.special_tokens) if token not in known]
        self._added = {token: base.vocab_size + number for number, token in enumerate(new)}
        self._ids = known | self._added
        self._names = {number: token for token, number in self._ids.items()}
        self.vocab_size = base.vocab_size + len(new)
        self.image_id = self._ids[IMAGE]
        self.eod, self.bod, self.special_ids = base.eod, base.bod, base.special_ids
        self.name = f"MultimodalTokenizer({base.name}, {options.prompt_format or 'no prompt format'})"
        self._text_pattern = _pattern(options.special_tokens)
        self._format: PromptFormat | None = None
        if options.prompt_format is not None:
            self._format = PROMPT_FORMATS[options.prompt_format]
            self._named = {role: self._role_token(role) for role in ("bos", "eos")}
            self._chat_pattern = _pattern(self._chat_tokens())

    @property
    def sentinel_ids(self) -> tuple[int, ...]:
        return find_sentinels(self._ids.get)

    @property
    def pad_id(self) -> int | None:
        """The id that fills up samples: the format's, or that of the other tokenizer."""
        pad = "pad" if self._format is None else self._format.pad
        return self.special_ids[pad] if pad in self.special_ids else self._ids.get(pad)

    @property
    def fingerprint(self) -> TokenizerFingerprint:
        held = self.base.fingerprint
        special = [held.special_tokens, sorted(self._added.items()), self.options.image_tag_type]
        return replace(held, special_tokens=hash_of(special))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [list(_parts(self._tagged(text)[0], self._text_pattern)) for text in texts]
        encoded = iter(self.base.encode_batch([part for of_text in parts for part, _, token in of_text if not token]))
        return [
            [number for part, _, token in of_text for number in ([self._ids[part]] if token else next(encoded))]
            for of_text in parts
        ]

    def encode_with_offsets(self, text: str) -> EncodedText:
        """Returns ids and spans; those of a tag are empty, at its image."""
        tagged, places = self._tagged(text)
        encoded = self._encode_spans(tagged, self._text_pattern)
        return EncodedText(encoded.ids, [(places[start], places[stop]) for start, stop in encoded.spans])

    def encode_written(self, text: str) -> EncodedText:
        """Encodes a text whose image tags, and the marks of a prompt format, are written in it already."""
        return self._encode_spans(text, self._text_pattern if self._format is None else self._chat_pattern)

    def encode_conversation(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> EncodedConversation:
        """Encodes a conversation; with `add_generation_prompt` it ends where the assistant's next message begins."""
        if self._format is None:
            raise DataError("A conversation needs a prompt format. Give --tokenizer-prompt-format.")
        segments = self._format.segments(
            messages,
            named=self._named,
            force_system_message=self.options.force_system_message,
            add_generation_prompt=add_generation_prompt,
        )
        text, targets = "", []
        for segment in segments:
            if segment.is_target and IMAGE in segment.text:
                raise DataError(f"A message of the assistant has {IMAGE}: images are not predicted. Remove it there.")
            tagged, _ = self._tagged(segment.text)
            targets += [segment.is_target] * len(tagged)
            text += tagged
        encoded = self._encode_spans(text, self._chat_pattern)
        targets.append(False)
        return EncodedConversation(
            encoded.ids, [targets[start] for start, _ in encoded.spans], encoded.ids.count(self.image_id)
        )

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._names[part[0]] if added else self.base.decode(part) for part, added in self._runs(ids))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(
            self._names[part[0]].encode() if added else self.base.decode_bytes(part) for part, added in self._runs(ids)
        )

    def files(self) -> dict[str, bytes]:
        """Returns the other tokenizer's files, with the added tokens in its tokenizer.json, the options and a chat template."""
        held = self.base.files()
        content = held.get("tokenizer_config.json")
        settings: dict[str, Any] = {} if content is None else json.loads(content)
        settings[OPTIONS_KEY] = {**settings.get(OPTIONS_KEY, {}), STORED_KEY: asdict(self.options)}
        if self._format is not None:
            settings["chat_template"] = self._format.chat_template()
            held.pop("chat_template.jinja", None)
        if "tokenizer.json" in held:
            held["tokenizer.json"] = self._with_added(held["tokenizer.json"])
        return {**held, "tokenizer_config.json": json.dumps(settings, indent=1).encode()}

    def vocabulary_json(self) -> bytes:
        """Returns a tokenizer.json that maps ids to tokens."""
        return self._with_added(self._vocabulary)

    def _with_added(self, content: bytes) -> bytes:
        fast = load_fast(content)
        fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self._added])
        if any(fast.token_to_id(token) != number for token, number in self._added.items()):
            raise DataError(
                f"{self.base.name} leaves ids out, so that its tokenizer.json cannot have {' '.join(self._added)} as the ids after all "
                "others. Add them to its files, and leave them out of --special-tokens."
            )
        return fast.to_str().encode()

    def _tagged(self, text: str) -> tuple[str, Sequence[int]]:
        """Returns a text with tags around images, and where each of its characters was, and its end."""
        before, after = IMAGE_TAGS[self.options.image_tag_type]
        if not before or IMAGE not in text:
            return text, range(len(text) + 1)
        places: list[int] = []
        end = 0
        for match in re.finditer(re.escape(IMAGE), text):
            start, stop = match.span()
            places += [*range(end, start), *([start] * len(before)), *range(start, stop), *([stop] * len(after))]
            end = stop
        return text.replace(IMAGE, f"{before}{IMAGE}{after}"), [*places, *range(end, len(text) + 1)]

    def _encode_spans(self, text: str, pattern: re.Pattern[str]) -> EncodedText:
        ids: list[int] = []
        spans: list[Span] = []
        for part, start, is_token in _parts(text, pattern):
            if is_token:
                ids.append(self._ids[part])
                spans.append((start, start + len(part)))
                continue
            encoded = self.base.encode_with_offsets(part)
            ids += encoded.ids
            spans += [(start + first, start + last) for first, last in encoded.spans]
        return EncodedText(ids, spans)

    def _runs(self, ids: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Yields added ids one by one, and the runs of others between them."""
        run: list[int] = []
        for number in map(int, ids):
            if number < self.base.vocab_size or number not in self._names:
                run.append(number)
                continue
            if run:
                yield run, False
            yield [number], True
            run = []
        if run:
            yield run, False

    def _role_token(self, role: str) -> str:
        number = self.special_ids.get(role)
        name = None if number is None else self._names.get(number)
        if name is None and f"{{{role}}}" in repr(self._format):
            raise DataError(
                f"--tokenizer-prompt-format {self.options.prompt_format} needs a token of the role {role}, and {self.base.name} names "
                "none. Name it in the tokenizer_config.json, or choose another format."
            )
        return name or ""

    def _chat_tokens(self) -> list[str]:
        """Returns the tokens that are matched in a conversation."""
        assert self._format is not None
        if missing := [token for token in self._format.tokens if token not in self._ids]:
            raise DataError(
                f"--tokenizer-prompt-format {self.options.prompt_format} needs the tokens {' '.join(missing)}, which {self.base.name} does "
                "not have. Add them with --special-tokens, or choose the format of the model."
            )
        return [*self.options.special_tokens, *self._format.tokens, *filter(None, self._named.values())]


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(set(tokens), key=len, reverse=True))))


def _parts(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, int, bool]]:
    """Yields the parts of a text that are not empty: the part, where it begins, whether it is a token."""
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end : match.start()], end, False
        yield match.group(), match.start(), True
        end = match.end()
    if end < len(text):
        yield text[end:], end, False
