"""One request inside the engine: its tokens, pages and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from petatron.infer.constrained_decoding import ConstraintState
from petatron.infer.engine_outputs import Completion
from petatron.infer.kv_cache_pages import SCRATCH_SLOT, PrefixRoot
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.text_stream import TextStream


class AwaitedPrefix(NamedTuple):
    """A running sequence that computes the first `computed` tokens of a sequence that waits for them."""

    sequence: Sequence
    computed: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation so far.

    tokens: of both. computed: the number of leading tokens with rows in pages. max_length: the number of tokens at which it ends.
    slot: of its recurrent states, while it runs. is_long: it is longer than LongRoPE's original context. restarted: it was preempted
    and gave its pages back. awaited: the prefix that it waits for while another sequence computes it.
    images: those of the prompt. image_vectors: what the model makes of them, until the prompt is computed; image_index: the place of each
    token's among them, -1 for text. coordinates: of the prompt's tokens, where the model has some; position_offset: how much further
    than its place in the sequence a token after the prompt is.
    source: the prompt of an encoder-decoder, which its encoder reads; tokens are then the start of the answer and the answer.
    drafts: guesses of the tokens after the last (`draft/speculative_decoding.py`). draft_inputs: hidden states that the next drafts need
    again.
    """

    request: int
    tokens: list[int]
    params: SamplingParams
    max_length: int
    stream: TextStream
    completion: Completion
    constraint: ConstraintState | None = None
    pages: list[int] = field(default_factory=list)
    slot: int = SCRATCH_SLOT
    computed: int = 0
    is_long: bool = False
    restarted: bool = False
    awaited: AwaitedPrefix | None = None
    drafts: list[int] = field(default_factory=list)
    draft_inputs: Tensor | None = None
    source: list[int] = field(default_factory=list)
    images: PromptImages | None = None
    image_vectors: Tensor | None = None
    image_index: NDArray[np.int64] | None = None
    coordinates: NDArray[np.int64] | None = None
    position_offset: int = 0

    def start_again(self) -> None:
        """Resets what is computed and reported again: pages, and results about the prompt. Tokens and the constraint stay."""
        self.pages, self.computed, self.restarted = [], 0, True
        self.drafts, self.draft_inputs = [], None
        self.completion.prompt_logprobs.clear()
        self.completion.pooled = None

    def add_pooled(self, values: list[float]) -> None:
        """Adds a step's part of the vector that `SamplingParams.pooling` asks for."""
        share = len(self.completion.prompt_ids) if self.params.pooling == "mean" else 1
        before = self.completion.pooled or [0.0] * len(values)
        self.completion.pooled = [old + new / share for old, new in zip(before, values)]

    @property
    def num_prompt(self) -> int:
        return len(self.completion.prompt_ids)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def shareable(self) -> int:
        """The number of leading tokens that may come from the prefix cache: not the last; none if prompt predictions are reported."""
        reports_prompt = self.params.prompt_logprobs is not None or self.params.pooling is not None
        return 0 if reports_prompt else len(self.tokens) - 1

    @property
    def owner(self) -> str:
        return self.params.owner

    @property
    def prefix_root(self) -> PrefixRoot:
        """Sequences with the same one may share pages."""
        images = "" if self.images is None else self.images.digest
        return PrefixRoot(_prefix_group(self.params), self.is_long, images)

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


def _prefix_group(params: SamplingParams) -> str:
    """Returns the group of requests whose prompts have the same keys and values: those with the same adapter, of the groups they name."""
    return f"{params.adapter}\n{params.prefix_group}" if params.adapter else params.prefix_group
