"""The properties of the model that a server currently serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from petatron.base.errors import DataError
from petatron.data.image_text.image_prompt import ImagePrompts
from petatron.data.prompt.chat_template import ChatTemplate, special_token, tokenizer_chat_template, tokenizer_settings
from petatron.data.prompt.min_token_count import max_token_bytes
from petatron.data.prompt.prompt_encoder import PLAIN_STOP_STRINGS, PLAIN_TEMPLATE, surrounding_ids
from petatron.data.tokenizer import Tokenizer
from petatron.infer.sampling_params import NO_DEFAULTS, SamplingDefaults
from petatron.serve.engine_thread import ServedEngine
from petatron.serve.fill_in_middle import FillInMiddle, find_fill_in_middle
from petatron.serve.isolation.limited_worker_pool import Isolation
from petatron.serve.token_texts import TokenTexts

NO_IMAGES = "This model reads no images. Send text alone, or serve one of --model-type vlm."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Replaced as a whole when the engine is.

    chat_template: the plain dialogue of `petatron chat` where `has_chat_template` is false. prefix_ids: that the tokenizer puts
    before a text, which a chat template writes itself. suffix_ids: those after a text that is embedded.
    stop_ids: that end an answer unless a request says otherwise.
    max_token_bytes: of text in one token, where that is known (`data/prompt/min_token_count.py`). isolation: where templates
    are rendered, if not here. step: of the training run, where it follows one. sampling_defaults: of requests that do not say otherwise.
    fill_in_middle: the tokens for it, where the tokenizer has some. images: what writes prompts with images, or why there are none.
    adapter: the adapter that a request names as its model.
    """

    name: str
    max_length: int
    vocab_size: int
    tokenizer: Tokenizer | None
    texts: TokenTexts
    chat_template: ChatTemplate
    has_chat_template: bool
    stop_ids: tuple[int, ...]
    bos_id: int | None
    step: int | None = None
    created_s: int = 0
    special_tokens: dict[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    fill_in_middle: FillInMiddle | None = None
    max_token_bytes: int | None = None
    isolation: Isolation | None = None
    images: ImagePrompts | str = NO_IMAGES
    adapter: str = ""

    @classmethod
    def of_engine(
        cls,
        engine: ServedEngine,
        *,
        name: str,
        created_s: int,
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        step: int | None = None,
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
        images: ImagePrompts | str = NO_IMAGES,
    ) -> ModelCard:
        """`stop_ids` are added to the tokenizer's end of document; `chat_template` replaces the tokenizer's."""
        tokenizer = engine.tokenizer
        settings = tokenizer_settings(tokenizer)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {token_name: text for token_name in names if (text := special_token(settings, token_name))}
        eod = None if tokenizer is None else tokenizer.eod
        bos_ids = [] if tokenizer is None or "bos_token" not in special else tokenizer.encode(special["bos_token"])
        tokenizer_template = tokenizer_chat_template(tokenizer) if chat_template is None else None
        before, after = ((), ()) if tokenizer is None else surrounding_ids(tokenizer)
        given = None if chat_template is None else ChatTemplate(chat_template, special_tokens=special)
        return cls(
            name=name,
            max_length=engine.max_length,
            vocab_size=engine.vocab_size,
            tokenizer=tokenizer,
            texts=TokenTexts(tokenizer),
            chat_template=given or tokenizer_template or ChatTemplate(PLAIN_TEMPLATE),
            has_chat_template=(given or tokenizer_template) is not None,
            stop_ids=tuple(sorted({*stop_ids, *(() if eod is None else (eod,))})),
            bos_id=bos_ids[0] if len(bos_ids) == 1 else eod,
            step=step,
            created_s=created_s,
            special_tokens=special,
            prefix_ids=before,
            suffix_ids=after,
            sampling_defaults=sampling_defaults,
            fill_in_middle=find_fill_in_middle(tokenizer),
            max_token_bytes=max_token_bytes(tokenizer),
            images=images,
        )

    @property
    def max_prompt_tokens(self) -> int:
        """As many as there are positions: of prompt and answer together the last token is never an input."""
        return self.max_length - 1

    @property
    def chat_prefix_ids(self) -> tuple[int, ...]:
        return () if self.has_chat_template else self.prefix_ids

    @property
    def chat_stop_strings(self) -> tuple[str, ...]:
        """What ends an answer to messages besides the stop ids."""
        return () if self.has_chat_template else PLAIN_STOP_STRINGS

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """`ChatTemplate.render`, with limits where the template came with the model: it is a program of others."""
        if self.isolation is None or not self.has_chat_template:
            return await asyncio.to_thread(self.chat_template.render, messages, **arguments)
        return await self.isolation.render(self.chat_template, {"messages": messages, **arguments})

    def encode(self, text: str) -> list[int]:
        return self.needed_tokenizer().encode(text)

    def needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise DataError("The served model has no tokenizer. Send token ids instead of text.")
        return self.tokenizer
