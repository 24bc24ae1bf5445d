"""`RolloutLoader`: the loader of reinforcement learning. A step's micro-batches are answers that the model has just drawn.

It takes the place of a dataset's loader, so training, checkpoints and every layout are those of any run. All ranks draw together and know
all answers; rank 0 alone computes rewards. Answers are packed into rows, by best fit, and each data-parallel rank takes its share of the
rows: as many for each rank, the missing ones empty.

With --rollout-staleness K answers are drawn K steps before they are trained on; with --updates-per-rollout N the answers of N steps are
drawn at once, and with --rollout-epochs E they are trained on E times. All of them wait in `RolloutState`.

What else is to be known of answers, a critic's values for instance, is computed when they are drawn (`answer_judge.py`). A critic takes
its step before the model does, on the same micro-batches.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from petatron.base.errors import TrainError
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.config.rollout_layout import draws_in_place
from petatron.config.schema.objective_and_dataset_names import POLICY_GRADIENT
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import epoch_permutation
from petatron.data.packed_segments import PackedSegment
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.policy_gradient import DRAWN_LOG_PROBS, OLD_LOG_PROBS
from petatron.posttrain.advantages import teaches_nothing
from petatron.posttrain.answer_judge import AnswerJudge
from petatron.posttrain.prompts import PromptSet
from petatron.posttrain.rewards.rollout_rewards import RolloutRewards
from petatron.posttrain.rollout import Rollout
from petatron.posttrain.rollout_batches import RolloutPacking
from petatron.posttrain.rollout_log import RolloutLog
from petatron.posttrain.rollout_sampler import PromptGroup, RolloutSampler
from petatron.posttrain.rollout_state import RolloutState

_log = get_logger(__name__)


class RolloutLoader:
    """A `StepLoader`. `iteration` returns that of the weights now; `log` is used by rank 0 alone."""

    rows_are_samples = False
    num_samples = None

    def __init__(
        self,
        run: RunConfig,
        mesh: ParallelMesh,
        prompts: PromptSet,
        sampler: RolloutSampler,
        rewards: RolloutRewards,
        state: RolloutState,
        log: RolloutLog,
        *,
        judge: AnswerJudge,
        packing: RolloutPacking,
        iteration: Callable[[], int],
    ) -> None:
        self._run, self._mesh, self._prompts, self._sampler = run, mesh, prompts, sampler
        self._rewards, self._state, self._log, self._iteration = rewards, state, log, iteration
        self._settings, self._judge, self._packing = run.rollout, judge, packing
        self.fingerprint = prompts.fingerprint
        self.step_metrics: Mapping[str, float] = {}

    def next_step(self, global_batch_size: int, consumed_samples: int) -> list[Batch]:
        """Returns this rank's micro-batches of the answers of a step; draws those that are due."""
        judge_s = self._judge.seconds
        metrics = self.draw_ahead(global_batch_size)
        answers = self._state.take()
        batches = self._packing.micro_batches([self._segment(rollout) for rollout in answers])
        self.step_metrics = {**metrics, **self._judge.learn(batches, answers)}
        if self._judge.uses_models:
            self.step_metrics = {**self.step_metrics, "judge s": self._judge.seconds - judge_s}
        return batches

    def draw_ahead(self, answers_per_step: int) -> Mapping[str, float]:
        """Draws the answers that are due, and returns the seconds that went into it."""
        ahead, iteration = self._settings.rollout_staleness, self._iteration()
        began, before, judge_s = time.perf_counter(), self._sampler.seconds, self._judge.seconds
        while len(self._state.waiting) <= ahead:
            self._state.put(self.draw(answers_per_step, iteration))
        total_s, spent = time.perf_counter() - began, self._sampler.seconds.since(before)
        others_s = spent.draw + spent.handover + self._judge.seconds - judge_s
        seconds = {"draw s": spent.draw, "reward s": max(0.0, total_s - others_s)}
        return seconds if draws_in_place(self._run) else {**seconds, "hand-over s": spent.handover}

    def close(self) -> None:
        self._sampler.close()
        self._rewards.close()

    def draw(self, answers_per_step: int, iteration: int) -> list[list[Rollout]]:
        """Draws and rewards the answers of the steps that are drawn at once, and returns them as often as they are learned from."""
        settings, began = self._settings, time.perf_counter()
        count = answers_per_step * settings.updates_per_rollout // settings.rollouts_per_prompt
        groups: list[list[Rollout]] = []
        left_out: list[list[Rollout]] = []
        drawing_s = 0.0
        for attempt in range(1 + settings.redraw_equal_rewards):
            drawn, seconds = self._draw_groups(count - len(groups), iteration)
            drawing_s += seconds
            last = attempt == settings.redraw_equal_rewards
            for group in drawn:
                useless = teaches_nothing(np.array([rollout.reward for rollout in group]))
                (left_out if useless and not last else groups).append(group)
            if len(groups) == count:
                break
        judged = self._judge.judge(groups)
        self._write(
            iteration + 1 + len(self._state.waiting), [*judged, *(rollout for group in left_out for rollout in group)]
        )
        self._warn_of_failures(judged)
        has_rewards = self._run.train.objective == POLICY_GRADIENT
        if has_rewards and self._mesh.world.rank == 0 and not any(rollout.advantage for rollout in judged):
            text = "WARNING: iteration %d learns nothing from rewards: the answers to each prompt all have the same one"
            _log.warning(text, iteration + 1 + len(self._state.waiting))
        if self._mesh.world.rank == 0 and iteration % self._run.log.log_interval == 0:
            text = "answers of iteration %d: %s%s, %.2f s to draw, %.2f s to reward and write"
            mean_turns = sum(rollout.num_turns for rollout in judged) / len(judged)
            turns = f" of {mean_turns:.1f} turns" if settings.environment is not None else ""
            rest_s = time.perf_counter() - began - drawing_s
            _log.info(text, iteration + 1, count_with_noun(len(judged), "answer"), turns, drawing_s, rest_s)
        # A step has whole groups where they divide it; which answers share a step changes no advantage.
        steps = [judged[at : at + answers_per_step] for at in range(0, len(judged), answers_per_step)]
        return steps * settings.rollout_epochs

    def _draw_groups(self, count: int, iteration: int) -> tuple[list[list[Rollout]], float]:
        """Returns so many further groups with their rewards, and the seconds that drawing took."""
        first, total = self._state.groups, len(self._prompts)
        self._state.groups += count
        groups = []
        for group in range(first, first + count):
            epoch, place = divmod(group, total)
            number = int(epoch_permutation(self._run.train.seed, epoch, total)[place])
            groups.append(PromptGroup(self._prompts.prompts[number], number, group))
        began = time.perf_counter()
        drawn = self._sampler.draw(groups, version=iteration)
        seconds = time.perf_counter() - began
        return self._rewards.of(drawn, self._prompts), seconds

    def _write(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        if self._mesh.world.rank == 0:
            prompts = [self._prompts.prompts[rollout.prompt].text for rollout in rollouts]
            self._log.write(iteration, rollouts, prompts)

    def _warn_of_failures(self, rollouts: Sequence[Rollout]) -> None:
        failures = Counter(rollout.failure for rollout in rollouts if rollout.failure is not None)
        if not failures:
            return
        reason, count = failures.most_common(1)[0]
        if len(rollouts) == failures.total():
            raise TrainError(
                f"None of the {len(rollouts):,} answers of a step could be rewarded; most often: {reason}."
            )
        if self._mesh.world.rank == 0:
            text = "WARNING: %d of %d answers could not be rewarded and are left out; most often (%d): %s"
            _log.warning(text, failures.total(), len(rollouts), count, reason)

    def _segment(self, rollout: Rollout) -> PackedSegment:
        """Returns the segment of an answer; with the log-probabilities at its drawing as the old ones, if several steps learn from it.

        Where a single step learns from answers of former weights, importance weights correct that.
        """
        segment, settings = rollout.segment(), self._settings
        if OLD_LOG_PROBS in segment.of_ids or settings.updates_per_rollout * settings.rollout_epochs == 1:
            return segment
        return replace(segment, of_ids={**segment.of_ids, OLD_LOG_PROBS: segment.of_ids[DRAWN_LOG_PROBS]})
