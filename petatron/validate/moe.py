"""Rules about the mathematics of MoE: the router and load balancing. Its layout is checked in `layout.py`.

Also the rules of `--overlap-moe-expert-parallel-comm`, where the forward of one micro-batch and the backward of another alternate within
layers (`parallel/pipeline/combined_forward_backward.py`): tokens are dispatched by an all-to-all, the schedule alternates forwards and
backwards, and state that both passes use must not change inside a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import Problem
from petatron.config.schema.model import MoEConfig
from petatron.config.schema.moe_layer_freq import moe_layer_freq_problems
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.pipeline_schedules import OVERLAP_SCHEDULES
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import divisors
from petatron.validate.activation_offload import offload_flag


def check_moe(config: RawRunConfig, *, require_training: bool) -> Iterator[Problem]:
    moe = config.moe
    if moe.num_experts is None or moe.num_experts < 1:
        return
    yield from moe_layer_freq_problems(config)
    yield from _topk(moe, moe.num_experts)
    yield from _groups(moe, moe.num_experts)
    if moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is None:
        rule = "needs --moe-expert-capacity-factor, without which an expert has no capacity"
        yield Problem("--moe-pad-expert-input-to-capacity", "", rule, "Give it, or leave this out.")
    # A run that continues a trained model did not choose the routing.
    checkpoint = config.checkpoint
    continues = checkpoint.finetune or checkpoint.use_checkpoint_args or checkpoint.pretrained_checkpoint is not None
    if require_training and router_cannot_learn(moe) and not continues:
        rule = "with a softmax over the chosen expert alone gives every token the score 1, so the router cannot learn"
        fix = "Add --moe-router-pre-softmax; a model that is trained already continues with --from FOLDER."
        yield Problem("--moe-router-topk", "1", rule, fix)


def router_cannot_learn(moe: MoEConfig) -> bool:
    """Whether the router gets no gradient: a softmax over one chosen expert is 1. Sinkhorn scores top-1 otherwise."""
    if moe.moe_router_topk != 1 or moe.num_experts is None or moe.num_experts < 2:
        return False
    softmax = moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax
    return softmax and moe.moe_router_load_balancing_type != "sinkhorn"


def _topk(moe: MoEConfig, experts: int) -> Iterator[Problem]:
    topk = moe.moe_router_topk
    if not 1 <= topk <= experts:
        rule = f"is not between 1 and --num-experts {experts}"
        yield Problem("--moe-router-topk", str(topk), rule, f"Use {min(2, experts)}, say.")
    if moe.moe_apply_probs_on_input and topk != 1:
        rule = f"is for one expert per token, but --moe-router-topk is {topk}"
        yield Problem("--moe-apply-probs-on-input", "", rule, "Use --moe-router-topk 1.")


def _groups(moe: MoEConfig, experts: int) -> Iterator[Problem]:
    groups, chosen, topk = moe.moe_router_num_groups, moe.moe_router_group_topk, moe.moe_router_topk
    if groups is not None and (groups < 1 or experts % groups):
        rule = f"does not divide --num-experts {experts}"
        yield Problem("--moe-router-num-groups", str(groups), rule, f"Use {divisors(experts)}.")
        return
    if chosen is None:
        return
    summed, size = moe.moe_router_group_score_topk, experts // (groups or 1)
    if summed is not None and not 1 <= summed <= size:
        rule = f"is not between 1 and the {size} experts of a group"
        yield Problem("--moe-router-group-score-topk", str(summed), rule, "DeepSeek-V3 uses 2, DeepSeek-V2 uses 1.")
    where = "--moe-router-group-topk"
    if not 1 <= chosen <= (groups or 0):
        rule = f"is not between 1 and --moe-router-num-groups {groups or 'none'}"
        yield Problem(where, str(chosen), rule, "Use fewer groups per token than there are groups.")
    elif groups and topk > chosen * (experts // groups):
        rule = f"groups of {experts // groups} experts hold fewer than the --moe-router-topk {topk} a token needs"
        yield Problem(where, str(chosen), rule, f"Use {-(-topk // (experts // groups))} or more.")


MOE_OVERLAP_FLAG = "--overlap-moe-expert-parallel-comm"


def check_moe_overlap(config: RawRunConfig) -> Iterator[Problem]:
    if not config.parallel.overlap_moe_expert_parallel_comm:
        return
    for rule, fix in (*_needs(config), *_schedule(config), *_memory(config)):
        yield Problem(MOE_OVERLAP_FLAG, "", rule, fix)


OverlapProblem = tuple[str, str]
"""The rule that is broken, and a fix."""


def _needs(config: RawRunConfig) -> Iterator[OverlapProblem]:
    parallel, moe = config.parallel, config.moe
    if moe.num_experts is None:
        yield "needs --num-experts: a dense model has no expert all-to-all", "Leave it out."
        return
    if parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1) == 1:
        rule = "needs --expert-model-parallel-size above 1: else no token is sent anywhere"
        yield rule, "Leave it out, or use 2 or more."
    if moe.moe_token_dispatcher_type != "alltoall":
        rule = f"needs --moe-token-dispatcher-type alltoall, but that is {moe.moe_token_dispatcher_type}"
        yield rule, "Use alltoall, or leave this out."


def _schedule(config: RawRunConfig) -> Iterator[OverlapProblem]:
    parallel = config.parallel
    name = parallel.pipeline_schedule
    if parallel.pipeline_model_parallel_size > 1 and name is not None and name not in OVERLAP_SCHEDULES:
        rule = f"cannot be combined with --pipeline-schedule {name}, which does not run forwards and backwards in turn"
        yield rule, f"Use {' or '.join(OVERLAP_SCHEDULES)}, or leave one of them out."
    if config.log.pipeline_timeline is not None:
        rule = "cannot be combined with --pipeline-timeline: two passes that run in turns have no times of their own"
        yield rule, "Leave one of them out."


def _memory(config: RawRunConfig) -> Iterator[OverlapProblem]:
    memory, strategy = config.memory, config.parallel.data_parallel_sharding_strategy
    again = "would repeat the all-to-all in the backward pass, with random states and hooks set back around it"
    if memory.recompute_granularity == "full":
        rule = f"cannot be combined with --recompute-granularity full, which {again}"
        yield rule, "Use selective recompute without moe."
    elif memory.recompute_granularity == "selective" and "moe" in memory.recompute_modules:
        rule = f"cannot be combined with --recompute-modules moe, which {again}"
        yield rule, "Use moe_act, shared_experts or others."
    if memory.recompute_memory_budget_gb is not None:
        rule = "cannot be combined with --recompute-memory-budget-gb, which may choose to recompute layers with their all-to-all"
        yield rule, "Use selective recompute without moe."
    if memory.offloads_activations:
        rule = f"cannot be combined with {offload_flag(memory)[0]}, whose copies follow one pass from layer to layer"
        yield rule, "Leave one of them out."
    if strategy in FSDP_STRATEGIES:
        rule = f"cannot be combined with --data-parallel-sharding-strategy {strategy}"
        why = "one pass would free the weights of a layer while the other is in it"
        yield f"{rule}: {why}", "Use optim (--use-distributed-optimizer), or leave one of them out."
