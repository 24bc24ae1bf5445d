"""Rules about answers that a run draws itself: how many there are, the room for them, and the layout in which they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from petatron.base.errors import Problem
from petatron.config.rollout_layout import chosen_sizes, draws_in_place, with_drawing_layout
from petatron.config.schema.fields import flag_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import divisors
from petatron.validate.exact_rollouts import EXACT_ROLLOUTS_FLAG
from petatron.validate.layer_kinds import check_recurrent_layers
from petatron.validate.layout import check_layout, check_pipeline


def check_rollouts(config: RawRunConfig) -> Iterator[Problem]:
    settings, train = config.rollout, config.train
    if not settings.rollout_prompts:
        return
    size, per_prompt = train.global_batch_size, settings.rollouts_per_prompt
    if size is not None and per_prompt > 0 and size * settings.updates_per_rollout % per_prompt:
        updates = settings.updates_per_rollout
        rule = f"counts answers, and with --updates-per-rollout {updates} is not a multiple of --rollouts-per-prompt {per_prompt}"
        yield Problem("--global-batch-size", str(size), rule, f"Use {max(1, size // per_prompt) * per_prompt}.")
    if per_prompt < 2 and settings.advantage != "gae":
        rule = f"leaves --advantage {settings.advantage} nothing to measure a reward against"
        yield Problem("--rollouts-per-prompt", str(per_prompt), rule, "Use 2 or more.")
    if settings.advantage == "gae" and settings.redraw_equal_rewards:
        rule = "replaces prompts whose answers all have one reward, and a critic learns from those too"
        yield Problem("--redraw-equal-rewards", str(settings.redraw_equal_rewards), rule, "Leave it out.")
    if settings.advantage == "gae" and config.model.model_type != "decoder":
        rule = f"trains a critic, and --model-type {config.model.model_type} has no head for values"
        yield Problem("--advantage", "gae", rule, "Use group, or another that compares answers.")
    if 0 < config.model.seq_length < settings.max_answer_tokens:
        rule = f"leaves no room for a prompt in --seq-length {config.model.seq_length}"
        yield Problem("--max-answer-tokens", str(settings.max_answer_tokens), rule, "Use a smaller one.")
    if train.rampup_batch_size or train.step_batch_size_schedule:
        flag = "--rampup-batch-size" if train.rampup_batch_size else "--step-batch-size-schedule"
        rule = "changes how many answers a step has, which are drawn for several"
        yield Problem(flag, "", rule, "Leave it out.")
    yield from _drawing_ranks(config)
    yield from _drawing_layout(config)


def _drawing_ranks(config: RawRunConfig) -> Iterator[Problem]:
    settings, world = config.rollout, config.parallel.world_size
    if not settings.rollout_ranks:
        return
    value = str(settings.rollout_ranks)
    if world is not None and world < 1:
        yield Problem("--rollout-ranks", value, "leaves no rank that trains", "Use fewer, or start more ranks.")
    if settings.rollout_staleness < 1:
        rule = "draws while others train, and with --rollout-staleness 0 each would wait for the other"
        yield Problem("--rollout-ranks", value, rule, "Add --rollout-staleness 1, or leave it out.")
    for flag, chosen, is_model in (
        ("--advantage", settings.advantage, settings.advantage == "gae"),
        ("--old-log-probs", settings.old_log_probs, settings.old_log_probs == "computed"),
    ):
        if is_model:
            rule = "needs a model that judges answers where they are drawn, and --rollout-ranks have the one that draws alone"
            yield Problem(flag, chosen, rule, "Use another, or leave --rollout-ranks out.")


def _drawing_layout(config: RawRunConfig) -> Iterator[Problem]:
    """Checks the layout of drawing by the rules of any layout; what is wrong with that of training is told by itself."""
    chosen, model = chosen_sizes(config), config.model
    world = config.rollout.rollout_ranks or config.parallel.world_size
    if draws_in_place(config) or world is None or world < 1 or min(chosen.values(), default=1) < 1:
        return
    drawing = with_drawing_layout(config)
    tp, pp = drawing.parallel.tensor_model_parallel_size, drawing.parallel.pipeline_model_parallel_size
    if min(tp, pp) < 1:
        return
    if world % (tp * pp):
        flag = next((name for name in chosen if name != "expert_model_parallel_size"), "tensor_model_parallel_size")
        rule = f"makes tp {tp} x pp {pp} = {tp * pp}, which does not divide the {world} ranks that draw"
        fix = f"Use sizes whose product is {divisors(world)}."
        yield Problem(flag_name(f"rollout_{flag}"), str(chosen.get(flag, tp)), rule, fix)
        return
    rules = (check_layout(drawing, require_training=False), check_pipeline(drawing), check_recurrent_layers(drawing))
    of_training = (
        check_layout(config, require_training=False),
        check_pipeline(config),
        check_recurrent_layers(config),
    )
    known = {(problem.where, problem.rule) for rule in of_training for problem in rule}
    for problem in (problem for rule in rules for problem in rule):
        # Steps of generation are padded to what sequence parallelism needs.
        if (problem.where, problem.rule) not in known and problem.where != "--seq-length":
            yield _about_drawing(problem, chosen)
    changes_sums = tp != config.parallel.tensor_model_parallel_size
    if config.train.exact_rollouts and changes_sums:
        rule = f"adds partial sums in another order than training with {tp_of(config)}, so {EXACT_ROLLOUTS_FLAG} does not hold"
        fix = f"Leave it out, or {EXACT_ROLLOUTS_FLAG}: then the difference is measured."
        yield Problem("--rollout-tensor-model-parallel-size", str(tp), rule, fix)
    if config.precision.fp8_format is not None and config.precision.fp8_recipe == "delayed":
        rule = "scales by what was seen in the layout of training, and answers are drawn in another one"
        fix = "Use tensorwise or blockwise, or draw in the layout of training."
        yield Problem("--fp8-recipe", "delayed", rule, fix)
    if model.adapter_base_format is not None:
        rule = "holds frozen weights in blocks of the layout of training, and answers are drawn in another one"
        yield Problem("--adapter-base-format", model.adapter_base_format, rule, "Draw in the layout of training.")


def tp_of(config: RawRunConfig) -> str:
    return f"--tensor-model-parallel-size {config.parallel.tensor_model_parallel_size}"


def _about_drawing(problem: Problem, chosen: dict[str, int]) -> Problem:
    """Returns a problem of a layout, with the flags that chose it."""
    texts = [problem.where, problem.rule, problem.fix]
    for name in chosen:
        flag, ours = flag_name(name), flag_name(f"rollout_{name}")
        texts = [text.replace(flag, ours) for text in texts]
    where, rule, fix = texts
    return replace(problem, where=where, rule=f"{rule} (while answers are drawn)", fix=fix)
