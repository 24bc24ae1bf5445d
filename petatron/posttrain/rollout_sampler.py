"""`RolloutSampler`: draws answers with the engine, by the weights that are trained, in place and in their layout.

Pages and captured steps of the engine take the memory that training leaves, so each round of drawing opens an engine and closes it, unless
`--rollout-keep-engine` says that memory suffices for both: then only what was computed from former weights is forgotten. A draw is a
function of (seed, group, sample, position), so a run that resumes draws the same answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from petatron.config.schema.run import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import MAX_SEED, SamplingParams
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.prompts import Prompt
from petatron.posttrain.rollout import Rollout


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A prompt to answer: its number in the order of files, and that of the group of answers, in the order of drawing."""

    prompt: Prompt
    number: int
    group: int


class RolloutSampler:
    """Every rank calls its methods, and gets the same answers."""

    def __init__(self, run: RunConfig, model: ParallelModel, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._model, self._tokenizer, self._stop_ids = model, tokenizer, tuple(stop_ids)
        self._settings, self._seed = run.rollout, run.train.seed
        self._options = EngineOptions(
            max_sequences=run.rollout.rollout_sequences,
            max_length=run.model.seq_length + 1,
            copied_weights=False,
            exact=run.train.exact_rollouts,
        )
        self._engine: Engine | None = None

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

    def close(self) -> None:
        if self._engine is not None:
            self._engine.release()
            self._engine = None

    def _complete(
        self, groups: Sequence[PromptGroup], count: int, temperature: float, *, purpose: str
    ) -> list[list[Completion]]:
        engine = self._open_engine()
        params = [[self._params(group, sample, temperature, purpose) for sample in range(count)] for group in groups]
        try:
            return engine.complete_on_all_ranks([group.prompt.ids for group in groups], params)
        finally:
            if not self._settings.rollout_keep_engine:
                self.close()

    def _open_engine(self) -> Engine:
        if self._engine is not None:
            self._engine.forget_prefixes()
            return self._engine
        if self._model.mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine asks the driver how much is free
        self._engine = Engine(self._model, self._tokenizer, self._options)
        return self._engine

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
