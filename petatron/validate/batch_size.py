"""Rules about batch sizes: of training, of evaluation, and those that grow over a run."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.batch_size_steps import BatchSizeStepsError, parse_batch_size_steps
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import multiples_near


def check_batch_size(config: RawRunConfig) -> Iterator[Problem]:
    train, replicas = config.train, config.parallel.data_parallel_size
    micro, batch = train.micro_batch_size, train.global_batch_size
    if replicas is None or replicas < 1 or micro < 1 or batch is None or batch < 1:
        return
    unit = micro * replicas
    yield from _evaluation_batch(config, replicas)
    product = f"micro-batch {micro} x data-parallel {replicas} = {unit}"
    if train.step_batch_size_schedule is not None:
        yield from _batch_size_steps(config, unit, product)
    elif batch % unit:
        fix = f"Nearest: {multiples_near(batch, unit)}."
        yield Problem("--global-batch-size", str(batch), f"is not a multiple of {product}", fix)
    elif train.rampup_batch_size:
        yield from _batch_size_rampup(train.rampup_batch_size, batch, unit, product)


def _evaluation_batch(config: RawRunConfig, replicas: int) -> Iterator[Problem]:
    train = config.train
    micro = train.eval_micro_batch_size or train.micro_batch_size
    batch = train.eval_global_batch_size or train.global_batch_size
    if (train.eval_global_batch_size is None and train.eval_micro_batch_size is None) or not batch or not micro:
        return
    if micro != train.micro_batch_size and config.parallel.pipeline_model_parallel_size > 1:
        rule = f"differs from --micro-batch-size {train.micro_batch_size}, whose shape transfers between pipeline stages have"
        yield Problem("--eval-micro-batch-size", str(micro), rule, "Leave it out, or use --pp 1.")
    where = "--eval-micro-batch-size" if train.eval_global_batch_size is None else "--eval-global-batch-size"
    unit = micro * replicas
    if batch % unit:
        rule = f"leaves batches of {batch} samples that are not multiples of micro-batch {micro} x data-parallel {replicas} = {unit}"
        fix = f"Use a batch of {multiples_near(batch, unit)} samples."
        yield Problem(where, str(train.eval_global_batch_size or micro), rule, fix)


def _batch_size_steps(config: RawRunConfig, unit: int, product: str) -> Iterator[Problem]:
    where, text = "--step-batch-size-schedule", config.train.step_batch_size_schedule
    if text is None:
        return
    try:
        steps = parse_batch_size_steps(text, config.model.seq_length)
    except BatchSizeStepsError as error:
        yield Problem(where, text, str(error), "Write sizes such as 0:16 2.4B:320.")
        return
    if config.train.rampup_batch_size:
        yield Problem(where, text, "cannot be combined with --rampup-batch-size", "Keep one of them.")
    if steps[-1][1] != config.train.global_batch_size:
        rule = f"ends with {steps[-1][1]}, but --global-batch-size is {config.train.global_batch_size}"
        yield Problem(where, text, rule, "Leave --global-batch-size out.")
    if wrong := [size for _, size in steps if size % unit]:
        rule = f"has {', '.join(map(str, wrong))}, not a multiple of {product}"
        yield Problem(where, text, rule, f"Use multiples of {unit}.")


def _batch_size_rampup(ramp: tuple[int, ...], batch: int, unit: int, product: str) -> Iterator[Problem]:
    where, value = "--rampup-batch-size", " ".join(str(number) for number in ramp)
    if len(ramp) != 3 or min(ramp) < 1:
        yield Problem(where, value, "is not three positive numbers", "Give START INCREMENT SAMPLES.")
        return
    start, increment, _ = ramp
    if start > batch:
        yield Problem(where, value, f"starts above --global-batch-size {batch}", f"Start at {batch} or less.")
    elif (batch - start) % increment:
        rule = f"never meets --global-batch-size {batch}: {batch} - {start} is not a multiple of {increment}"
        yield Problem(where, value, rule, "Change START or INCREMENT.")
    elif start % unit or (start < batch and increment % unit):
        rule = f"passes through batches that are not multiples of {product}"
        yield Problem(where, value, rule, f"Use multiples of {unit} for START and INCREMENT.")
