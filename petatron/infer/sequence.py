"""One request inside the engine: its tokens, pages and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from petatron.infer.constrained_decoding import ConstraintState
from petatron.infer.engine_outputs import Completion
from petatron.infer.kv_cache_pages import SCRATCH_SLOT, PrefixRoot
from petatron.infer.sampling_params import SamplingParams
from petatron.infer.text_stream import TextStream


class AwaitedPrefix(NamedTuple):
    """The running sequence whose first `computed` tokens are those of one that waits for them."""

    sequence: Sequence
    computed: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation so far.

    tokens: of both. computed: so many first tokens have their rows in pages. max_length: tokens at which it ends.
    slot: of its recurrent states, while it runs. is_long: it is beyond the original context of LongRoPE. restarted: it has run before, and
    gave its pages back.
    awaited: what another one computes of its prompt, while it waits for that.
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

    def start_again(self) -> None:
        """Forgets what is computed anew, and so reported anew: pages, and what is known of the prompt; its tokens stay, and
        with them the state of its constraint."""
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
        """So many first tokens may be found computed: not the last one, and none where predictions of the prompt are reported."""
        reports_prompt = self.params.prompt_logprobs is not None or self.params.pooling is not None
        return 0 if reports_prompt else len(self.tokens) - 1

    @property
    def owner(self) -> str:
        return self.params.owner

    @property
    def prefix_root(self) -> PrefixRoot:
        """Sequences with the same one may share pages."""
        return PrefixRoot(self.params.prefix_group, self.is_long)

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed
