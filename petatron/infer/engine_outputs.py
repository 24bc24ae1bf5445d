"""What the engine reports: of a request, events while it runs and the completion at its end; of all requests, counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "failed"]
"""A stop id or text was reached; the asked number of tokens, or the model's last position; the caller did not want more; an error
ended it, which `take` raises."""


class TokenLogprob(NamedTuple):
    """A token with its log-probability, and the most likely ids there, best first, with theirs.

    kept_mass: the probability of all ids that top-k, top-p and min-p kept, where `SamplingParams.policy_logprobs` asks for it.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    kept_mass: float = 1.0


class TokenEvent(NamedTuple):
    """Something new of a request.

    token: the new id; None where a request ends without one. text: what of the answer became certain with it: whole characters, and
    nothing that might become a stop text. logprob: if asked for. finish_reason: this is the last event of the request.
    """

    request: int
    token: int | None
    text: str = ""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Completion:
    """One answer.

    ids: the new tokens, with the stop id if one ended it. text: of them, without stop id and stop text. stop: the text or id that ended
    it. prompt_logprobs: of every prompt token but the first. cached_tokens: of the prompt, not computed but found in the
    prefix cache. pooled: the vector that `SamplingParams.pooling` asks for. items: those that `SamplingParams.best_items` asks for, with
    their scores, the best first.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    cached_tokens: int = 0
    pooled: list[float] | None = None
    items: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and the present state, of all replicas.

    computed_prompt_tokens: of all prompts, those that steps computed; a preempted sequence computes some again.
    With speculative decoding: drafted_tokens were verified, accepted_tokens of them are in answers, and a sequence's decode steps are
    counted in speculative_decodes.
    """

    waiting: int
    running: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculative_decodes: int = 0
    computed_prompt_tokens: int = 0

    @property
    def tokens_per_decode(self) -> float:
        """New tokens of a sequence in one step.

        >>> stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, drafted_tokens=10, accepted_tokens=6, speculative_decodes=10)
        >>> stats.tokens_per_decode
        1.6
        """
        return 1 + self.accepted_tokens / max(1, self.speculative_decodes)

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were accepted."""
        return self.accepted_tokens / max(1, self.drafted_tokens)
