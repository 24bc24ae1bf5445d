"""Rules about a run: precision, memory, batches, length, schedule and optimizer, whose rules are asked and never named."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import ConfigError, Problem
from petatron.config.declared_optimizers import find_rule_spec, unknown_optimizer, used_rules
from petatron.config.declared_rules import above, at_least, multiples_near, within
from petatron.config.pipeline_stages import max_layers_per_stage
from petatron.config.schema.batch_size_steps import BatchSizeStepsError, parse_batch_size_steps
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.optimizers.update_rule_spec import (
    OPTIMIZER_FLAG,
    OPTIMIZER_NAME,
    OPTIMIZER_SETTINGS_FLAG,
    UpdateRuleSpec,
)
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.training import BUILT_IN_RULES
from petatron.validate.activation_offload import check_activation_offload


def check_run(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    yield from _precision(config)
    yield from _memory(config)
    yield from _batch(config)
    yield from _length(config, require_training=require_training)
    yield from _schedule_units(config)
    yield from _schedule(config)
    yield from _learning_rate(config, require_training=require_training)
    yield from _optimizer(config)


def _precision(config: RawRunConfig) -> Iterator[Problem]:
    precision = config.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(precision, name)]
    if len(chosen) > 1:
        rule = f"cannot be combined with {' or '.join(chosen[1:])}"
        yield Problem(chosen[0], "", rule, "Keep one; none of them means fp32.")
    if precision.initial_loss_scale < precision.min_loss_scale:
        rule = f"is below --min-loss-scale {precision.min_loss_scale:g}"
        yield Problem("--initial-loss-scale", f"{precision.initial_loss_scale:g}", rule, "Start higher.")


def _memory(config: RawRunConfig) -> Iterator[Problem]:
    memory = config.memory
    granularity, budget = memory.recompute_granularity, memory.recompute_memory_budget_gb
    with_layers = memory.recompute_method is not None or memory.recompute_num_layers is not None
    if granularity == "full":
        if memory.recompute_method is None or memory.recompute_num_layers is None:
            rule = "full needs --recompute-method and --recompute-num-layers"
            yield Problem("--recompute-granularity", "", rule, "Common: --recompute-method uniform, 1 layer.")
    elif with_layers and granularity is not None:  # without one they have no effect, as in Megatron
        where = "--recompute-method" if memory.recompute_method is not None else "--recompute-num-layers"
        rule = f"applies to full recompute, but --recompute-granularity is {granularity}"
        yield Problem(where, "", rule, "Use --recompute-granularity full, or leave it out.")
    if budget is not None and granularity is not None:
        rule = f"chooses what to recompute, and so does --recompute-granularity {granularity}"
        yield Problem("--recompute-memory-budget-gb", f"{budget:g}", rule, "Keep one of them.")
    if budget is not None and config.parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        rule = f"cannot be kept with --pipeline-schedule {config.parallel.pipeline_schedule}, which holds operands back"
        yield Problem("--recompute-memory-budget-gb", f"{budget:g}", rule, "Use 1f1b or interleaved.")
    number, largest = memory.recompute_num_layers, max_layers_per_stage(config)
    if number is not None and largest is not None and number > largest:
        rule = f"is more than the {largest} layers of a pipeline stage"
        yield Problem("--recompute-num-layers", str(number), rule, f"Use {largest} or less.")
    yield from check_activation_offload(config)
    yield from within("optimizer_offload_fraction", memory.optimizer_offload_fraction, 0, 1, closed=True)
    if memory.optimizer_cpu_offload and memory.optimizer_nvme_offload is not None:
        rule = "and --optimizer-nvme-offload are two places for the same state"
        yield Problem("--optimizer-cpu-offload", "", rule, "Keep one of them.")


def _batch(config: RawRunConfig) -> Iterator[Problem]:
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


def _length(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    train = config.train
    if train.train_iters is not None and train.train_samples is not None:
        rule = f"cannot be combined with --train-samples {train.train_samples}"
        yield Problem("--train-iters", str(train.train_iters), rule, "Keep one of them.")
    if require_training and train.train_iters is None and train.train_samples is None:
        yield Problem("--train-iters", "", "is not set", "Give --train-iters or --train-samples.")
    yield from _first_batch(config)


def _first_batch(config: RawRunConfig) -> Iterator[Problem]:
    """Only whole batches are trained on, so a run must have at least its first."""
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


def _schedule_units(config: RawRunConfig) -> Iterator[Problem]:
    """A run counts in iterations or in samples; its schedule must count in the same."""
    train, schedule = config.train, config.schedule
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if getattr(train, f"train_{unit}") is None or getattr(train, f"train_{other}") is not None:
            continue
        for stem in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
            if value := getattr(schedule, f"{stem}_{other}"):
                rule = f"counts in another unit than --train-{unit}"
                yield Problem(flag_name(f"{stem}_{other}"), str(value), rule, f"Use {flag_name(f'{stem}_{unit}')}.")


def _schedule(config: RawRunConfig) -> Iterator[Problem]:
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
        yield from _lengths(config, unit)
    wsd_lengths = (schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_samples)
    if schedule.lr_decay_style == "WSD" and wsd_lengths == (None, None):
        rule = "WSD needs the length of its final decay"
        yield Problem("--lr-decay-style", "", rule, "Give --lr-wsd-decay-iters or --lr-wsd-decay-samples.")


def _lengths(config: RawRunConfig, unit: str) -> Iterator[Problem]:
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


def _optimizer(config: RawRunConfig) -> Iterator[Problem]:
    optim = config.optim
    start, end, style = optim.start_weight_decay, optim.end_weight_decay, optim.weight_decay_incr_style
    yield from at_least("weight_decay", optim.weight_decay, 0)
    if style == "constant" and (start is not None or end is not None):
        where = "--start-weight-decay" if start is not None else "--end-weight-decay"
        rule = "belongs to a weight-decay schedule, but --weight-decay-incr-style is constant"
        yield Problem(where, "", rule, "Use linear or cosine, or give --weight-decay alone.")
    elif style != "constant" and (start is None or end is None):
        rule = "needs --start-weight-decay and --end-weight-decay"
        yield Problem("--weight-decay-incr-style", style, rule, "Give both, or use constant.")
    elif start is not None and end is not None and not 0 <= start <= end:
        rule = f"is not between 0 and --end-weight-decay {end:g}"
        yield Problem("--start-weight-decay", f"{start:g}", rule, "Weight decay may only grow.")
    yield from at_least("clip_grad", optim.clip_grad, 0)
    yield from check_update_rule(config)
    strategy = config.parallel.data_parallel_sharding_strategy
    # Low-precision gradients require a model in low precision.
    if optim.main_grads_dtype == "bf16" and not config.precision.bf16:
        yield Problem("--main-grads-dtype", "bf16", "needs --bf16", "Give it, or use fp32.")
    if optim.main_grads_dtype == "bf16" and strategy in FSDP_STRATEGIES:
        rule = f"cannot be had with --data-parallel-sharding-strategy {strategy}, where fully_shard adds gradients up"
        yield Problem("--main-grads-dtype", "bf16", rule, "Use fp32, or the strategy optim.")


def check_update_rule(config: RawRunConfig) -> Iterator[Problem]:
    """Yields the problems of the chosen optimizer, of its settings, and of where its state is to be."""
    if unknown := list(_unknown_optimizers(config)):
        yield from unknown
        return
    try:
        rule, *others = used_rules(config.optim)
    except ConfigError as error:
        yield from error.problems
        return
    if config.optim.optimizer in BUILT_IN_RULES and config.optim.optimizer_settings:
        given = " ".join(config.optim.optimizer_settings)
        rule_text = f"are settings of an imported optimizer, and {OPTIMIZER_FLAG} {rule.name} has flags"
        yield Problem(OPTIMIZER_SETTINGS_FLAG, given, rule_text, "Leave them out.")
    yield from rule.problems()
    for other in others:  # the rule of the remaining parameters updates each element by itself, and all of them
        if other.unit != "element" or other.hidden_matrices_only:
            text = f"cannot leave other parameters to {other.name}, which does not update each element by itself"
            yield Problem(OPTIMIZER_FLAG, rule.name, text, "Use adam for them.")
    yield from _offload(config, rule)
    yield from _state_dtypes(config)


def _unknown_optimizers(config: RawRunConfig) -> Iterator[Problem]:
    for info in fields_by_name().values():
        name = getattr(getattr(config, info.section), info.name)
        if OPTIMIZER_NAME in info.marks and find_rule_spec(name) is None:
            yield unknown_optimizer(info.flag, name)


def _offload(config: RawRunConfig, rule: UpdateRuleSpec) -> Iterator[Problem]:
    memory, reason = config.memory, rule.offload_problem
    if reason is None:
        return
    for name in ("optimizer_cpu_offload", "optimizer_nvme_offload"):
        value = getattr(memory, name)
        if value is not None and value is not False:
            text = f"cannot be combined with {OPTIMIZER_FLAG} {rule.name}, {reason}"
            shown = "" if value is True else value
            yield Problem(flag_name(name), shown, text, "Leave it out, shard the state over more ranks, or use adam.")


def _state_dtypes(config: RawRunConfig) -> Iterator[Problem]:
    """State in bf16 requires a model in low precision."""
    if config.precision.fp64:
        for rule in used_rules(config.optim):
            for name, narrow in rule.bf16_state_settings.items():
                if getattr(config.optim, name) == narrow:
                    yield Problem(flag_name(name), narrow, "cannot be combined with --fp64", "Leave one of them out.")
