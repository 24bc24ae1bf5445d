"""`RolloutSampler`: draws the answers of a step with the engine.

A draw is a function of (seed, group, sample, position), so a run that resumes draws the same answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from petatron.config.schema.run import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import MAX_SEED, SamplingParams
from petatron.posttrain.prompts import Prompt
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_engine import EngineSeconds, RolloutEngine


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A prompt to answer: its number in the order of files, and that of the group of answers, in the order of drawing."""

    prompt: Prompt
    number: int
    group: int


class RolloutSampler:
    """Every rank calls its methods, and gets the same answers."""

    def __init__(self, run: RunConfig, engine: RolloutEngine, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._engine, self._tokenizer, self._stop_ids = engine, tokenizer, tuple(stop_ids)
        self._settings, self._seed = run.rollout, run.train.seed

    def draw(self, groups: Sequence[PromptGroup], *, version: int) -> list[list[Rollout]]:
        """Returns the answers to each prompt, by the weights of an iteration; without rewards."""
        settings = self._settings
        answers = self._complete(groups, settings.rollouts_per_prompt, settings.rollout_temperature, purpose="train")
        return [
            [self._rollout(group, sample, answer, version) for sample, answer in enumerate(of_group)]
            for group, of_group in zip(groups, answers)
        ]

    def evaluate(self, groups: Sequence[PromptGroup]) -> list[list[str]]:
        """Returns the texts of the answers to each prompt, as evaluations draw them."""
        settings = self._settings
        answers = self._complete(groups, settings.eval_rollouts, settings.eval_rollout_temperature, purpose="eval")
        return [[self._text(answer) for answer in of_group] for of_group in answers]

    @property
    def seconds(self) -> EngineSeconds:
        return self._engine.seconds

    def close(self) -> None:
        self._engine.close()

    def _complete(
        self, groups: Sequence[PromptGroup], count: int, temperature: float, *, purpose: str
    ) -> list[list[Completion]]:
        params = [[self._params(group, sample, temperature, purpose) for sample in range(count)] for group in groups]
        with self._engine.round():
            return self._engine.complete([group.prompt.ids for group in groups], params)

    def _params(self, group: PromptGroup, sample: int, temperature: float, purpose: str) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self._settings.max_answer_tokens,
            temperature=temperature,
            seed=_seed(self._seed, purpose, group.group),
            sample=sample,
            stop_ids=self._stop_ids,
            logprobs=0 if purpose == "train" else None,
            policy_logprobs=purpose == "train",
        )

    def _rollout(self, group: PromptGroup, sample: int, answer: Completion, version: int) -> Rollout:
        return Rollout(
            prompt=group.number,
            group=group.group,
            sample=sample,
            version=version,
            prompt_ids=group.prompt.ids,
            ids=tuple(answer.ids),
            log_probs=tuple(logprob.logprob for logprob in answer.logprobs),
            text=self._text(answer),
            finished=answer.finish_reason == "stop",
        )

    def _text(self, answer: Completion) -> str:
        ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self._stop_ids else answer.ids
        return self._tokenizer.decode(ids)


def _seed(seed: int, purpose: str, group: int) -> int:
    """Returns the seed of a group's draws: no two groups of a run share random numbers."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % MAX_SEED
