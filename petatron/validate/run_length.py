"""Rules about the length of a run, in iterations or samples."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.run import RawRunConfig


def check_run_length(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    train = config.train
    if train.train_iters is not None and train.train_samples is not None:
        rule = f"cannot be combined with --train-samples {train.train_samples}"
        yield Problem("--train-iters", str(train.train_iters), rule, "Keep one of them.")
    if require_training and train.train_iters is None and train.train_samples is None:
        rule = "is not set"
        if train.train_epochs is not None:
            rule += ", and `petatron train` alone derives it from --train-epochs, since it opens the data first"
        yield Problem("--train-iters", "", rule, "Give --train-iters or --train-samples.")
    yield from _first_batch(config)


def _first_batch(config: RawRunConfig) -> Iterator[Problem]:
    """Checks that `--train-samples` contain at least the first batch; only whole batches are trained on."""
    train = config.train
    samples, batch, ramp = train.train_samples, train.global_batch_size, train.rampup_batch_size
    if samples is None or samples < 1 or batch is None or train.train_iters is not None:
        return
    first, name = batch, f"--global-batch-size {batch}"
    if len(ramp) == 3 and 0 < ramp[0] <= batch:
        first, name = ramp[0], f"the {ramp[0]} of --rampup-batch-size"
    if samples < first:
        rule = f"is less than the first batch, {name}, so nothing would be trained"
        yield Problem("--train-samples", str(samples), rule, f"Use {first} or more, or a smaller batch.")
