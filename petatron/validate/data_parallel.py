"""Rules about data parallelism: what its ranks shard, and the precision of gradient reduction."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.declared_rules import at_least, divisors
from petatron.config.schema.fields import join_with_or
from petatron.config.schema.parallel import FSDP_STRATEGIES, RawParallelConfig
from petatron.config.schema.pipeline_schedules import SPLIT_BACKWARD_SCHEDULES
from petatron.config.schema.run import RawRunConfig

_STRATEGY = "--data-parallel-sharding-strategy"
_INSTANCES = "--num-distributed-optimizer-instances"


def check_data_parallel(config: RawRunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if strategy in FSDP_STRATEGIES:
        yield from _fully_sharded(parallel, strategy)
    else:
        yield from _optimizer_sharded(parallel, strategy)
    yield from _instances(parallel, experts=config.moe.num_experts is not None)
    if parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield Problem("--grad-reduce-in-bf16", "", "needs --bf16", "Give it, or leave this out.")


def _fully_sharded(parallel: RawParallelConfig, strategy: str) -> Iterator[Problem]:
    if parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        rule = f"splits the backward pass, which would bypass the gradient reduction of {_STRATEGY} {strategy}"
        fix = "Use 1f1b, interleaved or gpipe; or optim."
        yield Problem("--pipeline-schedule", str(parallel.pipeline_schedule), rule, fix)


def _optimizer_sharded(parallel: RawParallelConfig, strategy: str | None) -> Iterator[Problem]:
    sharded = parallel.use_distributed_optimizer
    if strategy == "no_shard" and sharded:
        rule = "contradicts --use-distributed-optimizer"
        yield Problem(_STRATEGY, strategy, rule, "Use optim, or leave one of them out.")
    elif strategy == "optim" and not sharded:
        rule = "contradicts --no-use-distributed-optimizer"
        yield Problem(_STRATEGY, strategy, rule, "Leave one of them out.")
    if parallel.overlap_param_gather and not (sharded and parallel.overlap_grad_reduce):
        rule = "needs --use-distributed-optimizer and --overlap-grad-reduce"
        yield Problem("--overlap-param-gather", "", rule, "Add them, or leave it out.")


def _instances(parallel: RawParallelConfig, *, experts: bool) -> Iterator[Problem]:
    """Every instance is a full replica, of the dense parameters and of the experts."""
    count, dp = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size
    yield from at_least("num_distributed_optimizer_instances", count, 1)
    if count < 1 or dp is None or dp < 1:
        return
    if dp % count:
        yield Problem(_INSTANCES, str(count), f"does not divide the data-parallel size {dp}", f"Use {divisors(dp)}.")
        return
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    ranks = dp * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    if experts and etp is not None and ep > 0 and etp > 0 and ranks % (ep * etp) == 0:
        replicas = ranks // (ep * etp)
        if replicas % count:
            rule = f"does not divide the {replicas} copies of each expert (edp)"
            usable = [size for size in range(1, replicas + 1) if replicas % size == 0 and dp % size == 0]
            yield Problem(_INSTANCES, str(count), rule, f"Use {join_with_or(usable)}.")
