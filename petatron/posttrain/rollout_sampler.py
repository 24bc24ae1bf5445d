"""`RolloutSampler`: draws the answers of a step with the engine, turn by turn where an environment answers them.

A draw is a function of (seed, group, sample, position), so a run that resumes draws the same answers. All episodes that go on are drawn
together, and what was computed of them before is in the engine's prefix cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from petatron.config.schema.run import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.infer.engine_outputs import Completion
from petatron.infer.sampling_params import MAX_SEED, SamplingParams
from petatron.posttrain.environment_turns import EnvironmentTurns
from petatron.posttrain.episode import Episode
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
    """Every rank calls its methods, and gets the same answers. environment: None: one answer is all."""

    def __init__(
        self,
        run: RunConfig,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        environment: EnvironmentTurns | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._stop_ids = engine, tokenizer, tuple(stop_ids)
        self._settings, self._seed, self._environment = run.rollout, run.train.seed, environment
        self._max_ids = run.model.seq_length + 1
        """Of an episode: the last one is no input."""

    def draw(self, groups: Sequence[PromptGroup], *, version: int) -> list[list[Rollout]]:
        """Returns the answers to each prompt, by the weights of an iteration; of rewards, those of the environment alone."""
        settings = self._settings
        return self._draw(groups, settings.rollouts_per_prompt, settings.rollout_temperature, version, purpose="train")

    def evaluate(self, groups: Sequence[PromptGroup]) -> list[list[Rollout]]:
        """Returns the answers to each prompt, as evaluations draw them: without log-probabilities."""
        settings = self._settings
        return self._draw(groups, settings.eval_rollouts, settings.eval_rollout_temperature, 0, purpose="eval")

    @property
    def seconds(self) -> EngineSeconds:
        return self._engine.seconds

    def close(self) -> None:
        self._engine.close()
        if self._environment is not None:
            self._environment.close()

    def _draw(
        self, groups: Sequence[PromptGroup], count: int, temperature: float, version: int, *, purpose: str
    ) -> list[list[Rollout]]:
        episodes = [
            [Episode(group.prompt, group.number, group.group, sample, group.prompt.ids) for sample in range(count)]
            for group in groups
        ]
        with self._engine.round():
            self._run([episode for of_group in episodes for episode in of_group], temperature, purpose)
        return [
            [episode.rollout(version, transcript=self._transcript(episode)) for episode in of_group]
            for of_group in episodes
        ]

    def _run(self, episodes: Sequence[Episode], temperature: float, purpose: str) -> None:
        """Draws the answers of episodes until all have ended."""
        most = 1 if self._environment is None else self._settings.max_turns
        if self._environment is not None:
            self._environment.start(episodes, purpose)
        for turn in range(1, most + 1):
            alive = [episode for episode in episodes if not episode.ended]
            if not alive:
                return
            params = [[self._params(episode, temperature, purpose)] for episode in alive]
            completions = self._engine.complete([episode.context for episode in alive], params)
            for episode, [completion] in zip(alive, completions, strict=True):
                episode.add_answer(completion, self._text(completion))
                episode.done = completion.finish_reason == "stop"
            if self._environment is not None:
                self._environment.step(alive, last=turn == most)

    def _params(self, episode: Episode, temperature: float, purpose: str) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=min(self._settings.max_answer_tokens, self._max_ids - len(episode.context)),
            temperature=temperature,
            seed=_seed(self._seed, purpose, episode.group),
            sample=episode.sample,
            stop_ids=self._stop_ids,
            wants_text=False,
            stop_strings=() if self._environment is None else self._environment.stop,
            logprobs=0 if purpose == "train" else None,
            policy_logprobs=purpose == "train",
        )

    def _text(self, answer: Completion) -> str:
        """Returns the text of an answer without what ended it."""
        if isinstance(answer.stop, str):
            return answer.text
        ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self._stop_ids else answer.ids
        return self._tokenizer.decode(ids)

    def _transcript(self, episode: Episode) -> str:
        return "" if self._environment is None else self._tokenizer.decode(episode.context)


def _seed(seed: int, purpose: str, group: int) -> int:
    """Returns the seed of a group's draws: no two groups of a run share random numbers."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % MAX_SEED
