"""Rules about FP8: which precision it requires, and which sizes its GEMMs support."""

from __future__ import annotations

import math
from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.sections.vocabulary import padded_rows
from petatron.config.setting_bounds_and_conflicts import multiples_near
from petatron.kernels.size_limits import FP8_SIZE_MULTIPLE, SCALINGS, fp8_size_multiple

_FLAG = "--fp8-format"
_GATHER = "--fp8-param-gather"


def check_fp8(config: RawRunConfig) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp8_format is None:
        return
    for name in ("fp16", "fp64"):
        if getattr(precision, name):
            yield Problem(_FLAG, precision.fp8_format, f"cannot be combined with --{name}", "Use --bf16.")
    yield from _bf16_layers(config)
    yield from _sizes(config)
    if precision.fp8_param_gather:
        yield from _param_gather(config)
    if precision.fp8_output_head_backward:
        yield from _output_grad(config)


def _output_grad(config: RawRunConfig) -> Iterator[Problem]:
    """Checks the size of a rank's vocabulary shard; while the vocabulary size is unknown, the multiple that it is padded to."""
    model, ranks = config.model, max(config.parallel.tensor_model_parallel_size, 1)
    divisor = max(model.make_vocab_size_divisible_by, 1)
    rows = divisor if model.vocab_size is None else padded_rows(model.vocab_size, divisor, ranks) // ranks
    if rows % FP8_SIZE_MULTIPLE != 0:
        has = f"a rank has {rows}" if model.vocab_size is not None else f"it is padded to multiples of {divisor}"
        rule = f"takes multiples of {FP8_SIZE_MULTIPLE} rows of the vocabulary, but {has}"
        fix = f"Use --make-vocab-size-divisible-by {multiples_near(divisor, FP8_SIZE_MULTIPLE)}; or leave it out."
        yield Problem("--fp8-output-head-backward", "", rule, fix)


def _bf16_layers(config: RawRunConfig) -> Iterator[Problem]:
    precision, layers = config.precision, config.model.num_layers
    kept = precision.num_layers_at_start_in_bf16 + precision.num_layers_at_end_in_bf16
    if precision.first_last_layers_bf16 and layers > 0 and kept >= layers:
        rule = f"leaves none of --num-layers {layers} in FP8 with {kept} first and last layers kept out of it"
        fix = "Lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16."
        yield Problem("--first-last-layers-bf16", "", rule, fix)


def _param_gather(config: RawRunConfig) -> Iterator[Problem]:
    """Checks that gathered FP8 weights serve every GEMM, and that some weights are gathered."""
    if config.precision.fp8_recipe == "rowwise":
        rule = "sends numbers with one scale, but --fp8-recipe rowwise gives each one two, its row's and its column's"
        fix = "Use tensorwise, delayed or blockwise; or leave it out."
        yield Problem(_GATHER, "", rule, fix)
    if config.parallel.data_parallel_sharding_strategy == "no_shard":
        rule = "has nothing to gather: every rank updates all weights"
        fix = "Add --use-distributed-optimizer, on two or more data-parallel ranks; or leave it out."
        yield Problem(_GATHER, "", rule, fix)


def _sizes(config: RawRunConfig) -> Iterator[Problem]:
    """Checks for sizes that would exclude every GEMM from FP8; GEMMs excluded one by one are reported at run time."""
    precision, model = config.precision, config.model
    multiple = fp8_size_multiple(SCALINGS[precision.fp8_recipe])
    how = f"{precision.fp8_format} with --fp8-recipe {precision.fp8_recipe}"
    takes = f"takes sizes that are multiples of {multiple}"
    if model.hidden_size % multiple != 0:
        fix = f"Nearest: {multiples_near(model.hidden_size, multiple)}."
        yield Problem(_FLAG, how, f"{takes}, but --hidden-size is {model.hidden_size}", fix)
    ranks, samples = max(config.parallel.context_parallel_size, 1), config.train.micro_batch_size
    tokens = model.seq_length * samples // ranks
    if tokens > 0 and tokens % multiple != 0:
        rule = f"{takes}, but a rank's micro-batch has {tokens} tokens"
        # Context parallelism splits a sequence into two parts of equal length for each rank.
        length_step = math.lcm(multiple * ranks // math.gcd(multiple * ranks, samples), 2 * ranks if ranks > 1 else 1)
        lengths = multiples_near(model.seq_length, length_step)
        batches = multiples_near(samples, multiple // math.gcd(multiple, max(model.seq_length // ranks, 1)))
        yield Problem(_FLAG, how, rule, f"Nearest: --seq-length {lengths}, or --micro-batch-size {batches}.")
