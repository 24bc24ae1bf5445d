"""Rules about the learning rate and its schedule: warm-up, decay, minimum."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.fields import flag_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import above, at_least


def check_lr_schedule(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    yield from _schedule_units(config)
    yield from _warmup_and_decay(config)
    yield from _learning_rate(config, require_training=require_training)


def _schedule_units(config: RawRunConfig) -> Iterator[Problem]:
    """Checks that the schedule counts in the unit of the run, iterations or samples."""
    train, schedule = config.train, config.schedule
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if getattr(train, f"train_{unit}") is None or getattr(train, f"train_{other}") is not None:
            continue
        for stem in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
            if value := getattr(schedule, f"{stem}_{other}"):
                rule = f"counts in another unit than --train-{unit}"
                yield Problem(flag_name(f"{stem}_{other}"), str(value), rule, f"Use {flag_name(f'{stem}_{unit}')}.")


def _warmup_and_decay(config: RawRunConfig) -> Iterator[Problem]:
    schedule = config.schedule
    for name in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
        # An unset decay length copies the run's, which has its own rule.
        if getattr(schedule, name) not in (config.train.train_iters, config.train.train_samples):
            yield from at_least(name, getattr(schedule, name), 1)
    warmups = ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
    forms = [flag_name(name) for name in warmups if getattr(schedule, name)]
    if len(forms) > 1:
        yield Problem(forms[0], "", f"cannot be combined with {' or '.join(forms[1:])}", "Keep one form of warm-up.")
    for unit in ("iters", "samples"):
        yield from _decay_lengths(config, unit)
    wsd_lengths = (schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples)
    if schedule.lr_decay_style == "WSD" and wsd_lengths == (None, None):
        rule = "WSD needs the length of its final decay"
        yield Problem("--lr-decay-style", "", rule, "Give --lr-wsd-decay-iters or --lr-wsd-decay-samples.")


def _decay_lengths(config: RawRunConfig, unit: str) -> Iterator[Problem]:
    schedule = config.schedule
    warmup, decay = getattr(schedule, f"lr_warmup_{unit}"), getattr(schedule, f"lr_decay_{unit}")
    final = getattr(schedule, f"lr_wsd_decay_{unit}")
    if decay is None or decay < 1:
        return
    if warmup >= decay:
        rule = f"is not below --lr-decay-{unit} {decay}"
        yield Problem(f"--lr-warmup-{unit}", str(warmup), rule, f"Use {decay - 1} or less, or decay for longer.")
    elif schedule.lr_decay_style == "WSD" and final is not None and final > decay - warmup:
        rule = f"is longer than --lr-decay-{unit} {decay} less the warm-up"
        yield Problem(f"--lr-wsd-decay-{unit}", str(final), rule, f"Use {decay - warmup} or less.")


def _learning_rate(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    lr, schedule = config.optim.lr, config.schedule
    if lr is None:
        if require_training:
            yield Problem("--lr", "", "is not set", "Give the peak learning rate, for instance --lr 3e-4.")
        return
    yield from above("lr", lr, 0)
    for name, value in (("--min-lr", schedule.min_lr), ("--lr-warmup-init", schedule.lr_warmup_init)):
        if value < 0:
            yield Problem(name, f"{value:g}", "is negative", "Use 0 or more.")
        elif value > lr > 0:
            yield Problem(name, f"{value:g}", f"is above --lr {lr:g}", f"Use {lr:g} or less.")
    yield from _decoupled_learning_rate(config)


def _decoupled_learning_rate(config: RawRunConfig) -> Iterator[Problem]:
    lr, schedule = config.optim.decoupled_lr, config.schedule
    yield from above("decoupled_lr", lr, 0)
    yield from at_least("decoupled_min_lr", schedule.decoupled_min_lr, 0)
    if lr is None or lr <= 0:
        return
    minimum = ("--decoupled-min-lr", schedule.decoupled_min_lr, f"Use {lr:g} or less.")
    if schedule.decoupled_min_lr is None:
        minimum = ("--min-lr", schedule.min_lr, f"Give --decoupled-min-lr, {lr:g} or less.")
    for name, value, fix in (minimum, ("--lr-warmup-init", schedule.lr_warmup_init, f"Use {lr:g} or less.")):
        if value is not None and value > lr:
            yield Problem(name, f"{value:g}", f"is above --decoupled-lr {lr:g}", fix)
