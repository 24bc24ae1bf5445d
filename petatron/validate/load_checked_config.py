"""Loads a config from all its sources (`config/read_config_sources.py`), checks every rule, and raises all problems together.

Only this module makes a `LoadedConfig`, so code that takes one, or its `RunConfig`, checks no settings. Each rule is in the file of its
topic: it reads the config and yields problems that name the flag, the value, the rule and a fix. Rules about fields that could not be
derived are skipped, because the cause is reported already.

Notices tell of valid settings whose effect depends on layers or hardware and may surprise. Settings without any effect are known from
their declaration (`config/setting_bounds_and_conflicts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from petatron.base.errors import Problem, raise_problems
from petatron.config.derived_defaults import resolve_derived
from petatron.config.hybrid_pattern_stage_bars import as_pattern_problem
from petatron.config.read_config_sources import ConfigSources, LoadedConfig, RawLoadedConfig, parse_config
from petatron.config.schema.fields import all_fields, fields_by_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import conflict_problems, number_problems, out_of_bounds
from petatron.config.value_origins import ValueOrigin
from petatron.validate.activation_offload import check_activation_offload, unused_offload_modules
from petatron.validate.batch_size import check_batch_size
from petatron.validate.cuda_graphs import check_cuda_graphs
from petatron.validate.data_and_output_settings import check_files
from petatron.validate.encoder_decoder import check_encoder_decoder
from petatron.validate.exact_rollouts import check_exact_rollouts
from petatron.validate.fp8 import check_fp8
from petatron.validate.layer_kinds import check_hybrid, check_recurrent_layers
from petatron.validate.layout import check_data_parallel, check_layout, check_pipeline
from petatron.validate.lr_schedule import check_lr_schedule
from petatron.validate.model_shape import check_model
from petatron.validate.moe import check_moe, check_moe_overlap, router_cannot_learn
from petatron.validate.mup import check_mup, mup_notices
from petatron.validate.optimizer import check_optimizer, check_optimizer_offload
from petatron.validate.precision import check_precision
from petatron.validate.recommender import check_recommender
from petatron.validate.recompute import check_recompute
from petatron.validate.rollouts import check_rollouts
from petatron.validate.run_length import check_run_length
from petatron.validate.sparse_attention import check_sparse_attention
from petatron.validate.task_head import check_task_head
from petatron.validate.vision_language import check_vision_language


def load_config(
    argv: Sequence[str] = (), *, require_training: bool = True, **sources: Unpack[ConfigSources]
) -> LoadedConfig:
    """Returns a valid config, or raises `ConfigError` with every problem.

    `argv` may itself contain `--preset NAME` and `--config FILE`. `require_training=False` is for subcommands that only need a
    model or a layout.

    >>> load_config(["--hidden-size", "64"], preset="tiny-llama", require_training=False).config.model.kv_channels
    8
    """
    return without_problems(*resolve_config(argv, require_training=require_training, **sources))


def without_problems(loaded: RawLoadedConfig, problems: Sequence[Problem]) -> LoadedConfig:
    """Returns the resolved config; raises `ConfigError` if there are problems."""
    raise_problems(problems)
    return LoadedConfig(resolve_derived(loaded.config), loaded.origins, loaded.notices)


def resolve_config(
    argv: Sequence[str] = (), *, require_training: bool = True, **sources: Unpack[ConfigSources]
) -> tuple[RawLoadedConfig, list[Problem]]:
    """Like `load_config`, but returns the problems and whatever could be parsed and derived.

    Leaves out problems of fields whose value could not be read, since that is a problem already.
    """
    parsed = parse_config(argv, **sources)
    loaded, origins = parsed.loaded, parsed.loaded.origins
    problems = check_config(loaded.config, require_training=require_training)
    told = [
        as_pattern_problem(_with_source(problem, origins), loaded.config, origins)
        for problem in problems
        if problem.where not in parsed.doubtful_flags
    ]
    notices = (*loaded.notices, *effect_notices(loaded.config, origins))
    return replace(loaded, notices=notices), parsed.problems + told


def _with_source(problem: Problem, origins: Mapping[str, ValueOrigin]) -> Problem:
    """Adds the checkpoint or model folder that a value comes from, if nobody typed the value."""
    origin = next((origins[info.path] for info in all_fields() if info.flag == problem.where), None)
    if origin is None or origin.kind != "checkpoint":
        return problem
    return replace(problem, value=f"{problem.value} of {origin.detail}".strip())


def check_config(config: RawRunConfig, *, require_training: bool = True) -> list[Problem]:
    """Returns every problem of a derived config; empty means it may run.

    `require_training=False` skips what only training needs: a length, a learning rate, data, a vocabulary.
    """
    rules = (
        number_problems(config),
        conflict_problems(config),
        check_model(config),
        check_encoder_decoder(config),
        check_vision_language(config),
        check_hybrid(config),
        check_sparse_attention(config),
        check_recurrent_layers(config),
        check_recommender(config),
        check_task_head(config, require_training=require_training),
        check_mup(config),
        check_moe(config, require_training=require_training),
        check_layout(config, require_training=require_training),
        check_pipeline(config),
        check_data_parallel(config),
        check_moe_overlap(config),
        check_fp8(config),
        check_precision(config),
        check_recompute(config),
        check_activation_offload(config),
        check_optimizer_offload(config),
        check_batch_size(config),
        check_run_length(config, require_training=require_training),
        check_lr_schedule(config, require_training=require_training),
        check_optimizer(config),
        check_cuda_graphs(config),
        check_exact_rollouts(config),
        check_rollouts(config),
        check_files(config, require_training=require_training),
    )
    problems = [problem for rule in rules for problem in rule]
    return problems + list(out_of_bounds(config, reported={problem.where for problem in problems}))


def effect_notices(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    """Yields a line for each setting with another effect than its name suggests, and each module that recompute or offload skips."""
    yield from _different_effects(config, origins)
    yield from mup_notices(config)
    if origins["memory.recompute_modules"].kind in ("flag", "file"):
        yield from _unused_recompute_modules(config)
    if origins["memory.offload_modules"].kind in ("flag", "file"):
        yield from unused_offload_modules(config)


def _steps_without_learning_rate(config: RawRunConfig) -> Iterator[str]:
    schedule, train = config.schedule, config.train
    if schedule.lr_decay_style not in ("linear", "cosine") or schedule.min_lr > 0:
        return
    for unit, decay, length in (
        ("iters", schedule.lr_decay_iters, train.train_iters),
        ("samples", schedule.lr_decay_samples, train.train_samples),
    ):
        if decay is not None and length is not None and decay < length:
            yield (
                f"--lr-decay-{unit} {decay} ends before --train-{unit} {length}, and from there on the learning rate is 0. "
                f"Leave it out, or give --min-lr"
            )


def _different_effects(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    precision = config.precision
    yield from _steps_without_learning_rate(config)
    if config.train.full_validation and origins["train.eval_iters"].kind in ("flag", "file"):
        yield (
            f"--eval-iters {config.train.eval_iters} has no effect on validation sets: --full-validation evaluates all of them. It is for "
            "the test set alone"
        )
    if router_cannot_learn(config.moe):
        yield (
            "--moe-router-topk 1 with a softmax over the chosen expert alone: the loss has no gradient for the router, which stays "
            "as it is but for load balancing"
        )
    # On by default, so that only an explicit flag shows that someone expects an effect.
    asked = config.moe.moe_shared_expert_overlap and origins["moe.moe_shared_expert_overlap"].kind == "flag"
    reason = fields_by_name()["moe_shared_expert_overlap"].unused_reason(config)
    if asked and config.moe.num_experts is not None and reason:
        yield f"--moe-shared-expert-overlap has no effect: {reason}"
    if precision.fp8_format == "hybrid" and precision.fp8_recipe == "blockwise":
        yield "--fp8-format hybrid is e4m3 with --fp8-recipe blockwise: hardware multiplies no blocks of e5m2"
    if precision.fp8_format is not None and precision.fp8_recipe == "mxfp8" and precision.fp8_param_gather:
        yield (
            "--fp8-param-gather with --fp8-recipe mxfp8 gathers weights in the precision of the run, as Megatron does: each number has two "
            "scales, its row's and its column's"
        )
    if precision.fp8_format is not None and not (precision.bf16 or precision.fp16 or precision.fp64):
        refused = origins["precision.bf16"].kind == "flag"  # --no-bf16, as in every run of `petatron verify`
        yield (
            f"--fp8-format {precision.fp8_format} is emulated, and slower than no FP8, in a run in fp32: hardware multiplies "
            f"eight-bit numbers for bfloat16 ones{'' if refused else '. Add --bf16'}"
        )


def _unused_recompute_modules(config: RawRunConfig) -> Iterator[str]:
    """Yields a line for each module in --recompute-modules that the model lacks, or that saves nothing for backward."""
    if config.memory.recompute_granularity != "selective":
        return
    lacking = {"moe_act": "what an activation function makes is never kept"}
    if not _saves_norm_outputs(config):
        lacking["layernorm"] = "what a norm makes is not kept here"
    for feature in dict.fromkeys(info.feature for info in all_fields()):
        if feature.recompute_modules and (reason := feature.unused_reason(config)):
            lacking |= dict.fromkeys(feature.recompute_modules, reason)
    if config.moe.num_experts is None or config.moe.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "there is no shared expert"
    for module in config.memory.recompute_modules:
        if module in lacking:
            yield f"--recompute-modules {module} has no effect: {lacking[module]}"


def _saves_norm_outputs(config: RawRunConfig) -> bool:
    """Whether norm outputs are saved for backward: by a router whose GEMM uses them directly."""
    precision, moe = config.precision, config.moe
    if moe.num_experts is None or moe.moe_input_jitter_eps:
        return False
    short = precision.bf16 or precision.fp16
    return moe.moe_router_dtype is None or precision.fp64 or (moe.moe_router_dtype == "fp32" and not short)
