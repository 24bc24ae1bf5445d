"""Rules about answers that a run draws itself: how many there are, and the room for them."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.run import RawRunConfig


def check_rollouts(config: RawRunConfig) -> Iterator[Problem]:
    settings, train = config.rollout, config.train
    if not settings.rollout_prompts:
        return
    size, per_prompt = train.global_batch_size, settings.rollouts_per_prompt
    if size is not None and size * settings.updates_per_rollout % per_prompt:
        updates = settings.updates_per_rollout
        rule = f"counts answers, and with --updates-per-rollout {updates} is not a multiple of --rollouts-per-prompt {per_prompt}"
        yield Problem("--global-batch-size", str(size), rule, f"Use {max(1, size // per_prompt) * per_prompt}.")
    if 0 < config.model.seq_length < settings.max_answer_tokens:
        rule = f"leaves no room for a prompt in --seq-length {config.model.seq_length}"
        yield Problem("--max-answer-tokens", str(settings.max_answer_tokens), rule, "Use a smaller one.")
    if train.rampup_batch_size or train.step_batch_size_schedule:
        flag = "--rampup-batch-size" if train.rampup_batch_size else "--step-batch-size-schedule"
        rule = "changes how many answers a step has, which are drawn for several"
        yield Problem(flag, "", rule, "Leave it out.")
