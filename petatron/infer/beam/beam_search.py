"""Beam search: the answers of the highest probability that a search of a given width finds.

A beam is a sequence so far and the sum of its log-probabilities. A step asks for the most likely ids after every beam, and keeps of all
continuations the `width` best that have not ended. One that ends is scored by the sum over its length to the power of `length_penalty`, and
is kept if it is among the step's `width` best, and among the `width` best answers so far. The search ends at `max_new_tokens`; when `width`
answers have ended and the best beam, scored at its present length, is no better than the worst of them; with `early_stopping`, as soon as
there are `width` answers. That is the rule of transformers' `early_stopping=False` (and `True`), and of Megatron-LM's own search.

A step of the search is one request of one new token for each beam. The prefix cache has the full pages that beams share, so a step
recomputes only the tokens in each beam's last, partial page; a model with recurrent states has no such cache, and computes each beam from
its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from petatron.base.errors import ConfigError, DataError, Problem, raise_problems
from petatron.infer.check_request import check_request
from petatron.infer.engine import Engine
from petatron.infer.engine_outputs import TokenLogprob
from petatron.infer.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

MAX_LENGTH_PENALTY = 50
"""No power of a length overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How a prompt is searched.

    width: beams that are kept, and answers at most. length_penalty: above 0 prefers long answers, below 0 short ones; at 0 the sum alone
    counts. early_stopping: ends with the first `width` answers. stop_ids: end an answer, and are its last id.
    """

    width: int
    max_new_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            ("width", self.width >= 1, "keeps no beam", "1 is greedy."),
            ("max_new_tokens", self.max_new_tokens >= 1, "asks for nothing", "Ask for one token or more."),
            (
                "length_penalty",
                abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
                f"is not between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}",
                "1 is the mean over tokens.",
            ),
        )
        problems = [
            Problem(f"beam {name}", str(getattr(self, name)), rule, fix) for name, ok, rule, fix in checks if not ok
        ]
        raise_problems(problems)


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """Its new ids, the stop id included; the sum of their log-probabilities; and the sum over length ** length_penalty."""

    ids: tuple[int, ...]
    logprob: float
    score: float

    def text_ids(self, stop_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids that are text: all but the stop id."""
        return self.ids[:-1] if self.ids[-1] in stop_ids else self.ids


@dataclass(slots=True)
class _Beam:
    ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(slots=True)
class BeamSearch:
    """The search for one prompt, without the model: `requests` says what to ask it, `advance` takes what it found.

    >>> search = BeamSearch([1], BeamParams(width=1, max_new_tokens=2), vocab_size=9)
    >>> for top in (((4, -0.5), (5, -1.0)), ((6, -0.1), (7, -3.0))):
    ...     [(prompt, params)] = search.requests()
    ...     search.advance([TokenLogprob(top[0][0], top[0][1], top)])
    >>> search.is_over, search.answers[0].ids, search.answers[0].score
    (True, (4, 6), -0.3)
    """

    prompt_ids: Sequence[int]
    params: BeamParams
    vocab_size: int
    answers: list[BeamAnswer] = field(default_factory=list)
    """The best first."""
    is_over: bool = False
    _beams: list[_Beam] = field(default_factory=lambda: [_Beam()])

    def __post_init__(self) -> None:
        if self._num_top > MAX_TOP_LOGPROBS:
            most = MAX_TOP_LOGPROBS - len(self.params.stop_ids)
            rule = f"is more than the {most} beams whose continuations an engine reports"
            raise ConfigError([Problem("beam width", str(self.params.width), rule, f"Use at most {most}.")])

    @property
    def _num_top(self) -> int:
        """Ids to know after each beam: if all that can end it are among them, there are still `width` others."""
        return min(self.params.width + len(self.params.stop_ids), self.vocab_size)

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Returns the prompts of the next step, one for each beam, and how to continue them."""
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, logprobs=self._num_top)
        return [([*self.prompt_ids, *beam.ids], sampling) for beam in self._beams]

    def advance(self, continuations: Sequence[TokenLogprob]) -> None:
        """Takes the most likely ids after each beam."""
        width, length = self.params.width, len(self._beams[0].ids) + 1
        candidates = self._candidates(continuations)
        ended = [beam.ids[-1] in self.params.stop_ids or length == self.params.max_new_tokens for beam in candidates]
        if not (self.params.early_stopping and len(self.answers) == width):
            for beam, ends in list(zip(candidates, ended))[:width]:
                if ends:
                    self.answers.append(BeamAnswer(beam.ids, beam.logprob, self._score(beam, length)))
            self.answers = sorted(self.answers, key=lambda answer: -answer.score)[:width]
        self._beams = [beam for beam, ends in zip(candidates, ended) if not ends][:width]
        full = len(self.answers) == width
        self.is_over = not self._beams or (
            full and (self.params.early_stopping or self._score(self._beams[0], length) <= self.answers[-1].score)
        )

    def _candidates(self, continuations: Sequence[TokenLogprob]) -> list[_Beam]:
        continued = [
            _Beam((*beam.ids, token), beam.logprob + logprob)
            for beam, after in zip(self._beams, continuations, strict=True)
            for token, logprob in after.top
        ]
        return sorted(continued, key=lambda beam: -beam.logprob)

    def _score(self, beam: _Beam, length: int) -> float:
        return beam.logprob / length**self.params.length_penalty


def beam_search(engine: Engine, prompts: Sequence[Sequence[int]], params: BeamParams) -> list[list[BeamAnswer]]:
    """Returns the answers to each prompt, the best first. At rank 0; all prompts are searched at once.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> engine = Engine(petatron.build_model(run, petatron.launch(run)))
    >>> [answers] = beam_search(engine, [[1, 2, 3]], BeamParams(width=3, max_new_tokens=4))
    >>> [len(answer.ids) for answer in answers]
    [4, 4, 4]
    """
    if engine.source_length is not None:
        raise DataError(
            "A beam search continues its prompts, and an encoder-decoder has them apart from the answer. Leave it out."
        )
    longest = SamplingParams(max_new_tokens=params.max_new_tokens, stop_ids=params.stop_ids)
    for prompt in prompts:
        check_request(prompt, longest, engine)
    searches = [BeamSearch(prompt, params, engine.vocab_size) for prompt in prompts]
    while running := [search for search in searches if not search.is_over]:
        numbers = [[engine.submit(*request) for request in search.requests()] for search in running]
        while engine.has_work:
            engine.step()
        for search, requests in zip(running, numbers):
            search.advance([engine.take(number).logprobs[0] for number in requests])
    return [search.answers for search in searches]
