"""Rules of context, expert and data parallelism and of recompute: one bad value each, and what derivation fills in."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.config import LoadedConfig
from petatron.validate import load_config, resolve_config

# 4 layers, 8 heads, 4 key/value heads, sequences of 128.
BASE = shlex.split("--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100")


def load(flags: str) -> LoadedConfig:
    return load_config([*BASE, *shlex.split(flags)])


EXPERTS = "--num-experts 8"
REFUSED = [
    # pipeline
    ("--pp 3 --num-layers 2 --pipeline-model-parallel-layout Et||tL", "--pipeline-model-parallel-layout Et||tL leaves pipeline rank 1 without a layer. Give every rank a t, or use fewer ranks."),
    ("--pp 2 --pipeline-schedule zb-h1 --recompute-memory-budget-gb 1", "--recompute-memory-budget-gb 1 cannot be kept with --pipeline-schedule zb-h1, which holds operands back. Use 1f1b or interleaved."),
    # context parallelism
    ("--cp 3", "--seq-length 128 is not a multiple of 2 x --context-parallel-size 3 = 6. Nearest: 126 or 132."),
    ("--cp 2 --tp 8 --sp --seq-length 136", "--seq-length 136 is not a multiple of tp 8 x cp 2 = 16, which --sequence-parallel needs. Nearest: 128 or 144."),
    ("--cp 8 --cp-comm-type a2a", "--cp-comm-type a2a splits the 4 key/value heads of a rank over 8 ranks, which does not divide. Use p2p, all_gather or a2a+p2p, or another layout."),
    ("--cp 4 --tp 4 --cp-comm-type a2a", "--cp-comm-type a2a splits the 2 query heads of a rank over 4 ranks, which does not divide. Use p2p, all_gather or a2a+p2p, or another layout."),
    ("--cp 2 --tp 4 --cp-comm-type a2a", "--cp-comm-type a2a splits the 1 key/value heads of a rank over 2 ranks, which does not divide. Use p2p, all_gather or a2a+p2p, or another layout."),
    ("--cp 4 --hierarchical-context-parallel-sizes 2 2", "--hierarchical-context-parallel-sizes 2 2 is for --cp-comm-type a2a+p2p, but that is p2p. Leave it out, or use a2a+p2p."),
    ("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", "--hierarchical-context-parallel-sizes 2 4 is not two positive numbers whose product is --context-parallel-size 4. Use, for instance, 1 4; or leave it out."),
    ("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4", "--hierarchical-context-parallel-sizes 4 is not two positive numbers whose product is --context-parallel-size 4. Use, for instance, 1 4; or leave it out."),
    ("--cp 16 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 2", "--hierarchical-context-parallel-sizes 8 2 splits the 4 key/value heads of a rank over 8 ranks, which does not divide. Use a smaller first number, or leave it out."),
    # tensor-parallel overlap
    ("--tp 2 --tp-comm-overlap", "--tp-comm-overlap overlaps the all-gathers and reduce-scatters of --sequence-parallel, which is off. Add --sequence-parallel, or leave it out."),
    ("--tp 2 --sp --tp-comm-overlap --tp-comm-overlap-chunks 1", "--tp-comm-overlap-chunks 1 leaves no chunk to communicate beside the GEMM of another. Use 2 or more."),
    # the experts' layout
    ("--ep 2", "--expert-model-parallel-size 2 needs --num-experts. Use 1 for a dense model."),
    (f"{EXPERTS} --ep 3 --dp 3", "--expert-model-parallel-size 3 does not divide --num-experts 8. Use 1, 2, 4 or 8."),
    (f"{EXPERTS} --ep 4 --dp 2", "--expert-model-parallel-size 4 x etp 1 x pp 1 = 4 does not divide the world size 2. Use 4 ranks (--dp 4 or --nproc-per-node 4), or fewer for the experts."),
    (f"{EXPERTS} --ep 4 --pp 2 --dp 2", "--expert-model-parallel-size 4 x etp 1 x pp 2 = 8 does not divide the world size 4. Use 8 ranks (--dp 4 or --nproc-per-node 8), or fewer for the experts."),
    (f"{EXPERTS} --ep 2", "--expert-model-parallel-size 2 x etp 1 x pp 1 = 2 does not divide the world size 1. Use 2 ranks (--dp 2 or --nproc-per-node 2), or fewer for the experts."),
    (f"{EXPERTS} --ep 8 --nnodes 3 --master-addr node0 --master-port 1234 --nproc-per-node 1", "--expert-model-parallel-size 8 x etp 1 x pp 1 = 8 does not divide the world size 3. Use 8 ranks (--dp 8), or fewer for the experts."),
    (f"{EXPERTS} --etp 2 --dp 2 --moe-ffn-hidden-size 33", "--moe-ffn-hidden-size 33 is not a multiple of --expert-tensor-parallel-size 2. Nearest: 32 or 34."),
    (f"{EXPERTS} --tp 2 --moe-shared-expert-intermediate-size 33", "--moe-shared-expert-intermediate-size 33 is not a multiple of --tensor-model-parallel-size 2. Nearest: 32 or 34."),
    (f"{EXPERTS} --tp 2 --no-sp", "--sequence-parallel cannot be turned off with --num-experts and --tensor-model-parallel-size 2: each token must be routed once. Leave it out; it is turned on by itself."),
    # the router
    ("--num-experts 0", "--num-experts 0 is below 1. Use 1 or more."),
    ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is not between 1 and --num-experts 2. Use 2, say."),
    (f"{EXPERTS} --moe-router-topk 1", "--moe-router-topk 1 with a softmax over the chosen expert alone gives every token the score 1, so the router cannot learn. Add --moe-router-pre-softmax; a model that is trained already continues with --from FOLDER."),
    (f"{EXPERTS} --moe-layer-freq [1]*3", "--moe-layer-freq [1]*3 is a pattern of 3 layers, but --num-layers is 4. Write one 0 or 1 per layer."),
    (f"{EXPERTS} --moe-router-num-groups 3", "--moe-router-num-groups 3 does not divide --num-experts 8. Use 1, 2, 4 or 8."),
    (f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 3", "--moe-router-group-topk 3 is not between 1 and --moe-router-num-groups 2. Use fewer groups per token than there are groups."),
    (f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-score-topk 5", "--moe-router-group-score-topk 5 is not between 1 and the 4 experts of a group. DeepSeek-V3 uses 2, DeepSeek-V2 uses 1."),
    (f"{EXPERTS} --moe-router-group-topk 1", "--moe-router-group-topk 1 is not between 1 and --moe-router-num-groups none. Use fewer groups per token than there are groups."),
    (f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 4", "--moe-router-group-topk 1 groups of 2 experts hold fewer than the --moe-router-topk 4 a token needs. Use 2 or more."),
    (f"{EXPERTS} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias balances sigmoid scores, but --moe-router-score-function is softmax. Use --moe-router-score-function sigmoid."),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.1 weighs a balancing loss, but --moe-router-load-balancing-type sinkhorn has none. Use 0."),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1", "--moe-expert-capacity-factor cannot be combined with --moe-router-load-balancing-type sinkhorn, which assigns tokens by itself. Use aux_loss or none, or leave it out."),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias cannot be combined with --moe-router-load-balancing-type sinkhorn, which assigns tokens by itself. Use aux_loss or none, or leave it out."),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-num-groups 2 --moe-router-group-topk 1", "--moe-router-group-topk cannot be combined with --moe-router-load-balancing-type sinkhorn, which assigns tokens by itself. Use aux_loss or none, or leave it out."),
    (f"{EXPERTS} --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0 is not above 0. Use a number above 0."),
    (f"{EXPERTS} --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, without which an expert has no capacity. Give it, or leave this out."),
    (f"{EXPERTS} --moe-input-jitter-eps 1", "--moe-input-jitter-eps 1.0 is out of range. Use a number from 0 to 1, 1 excluded."),
    (f"{EXPERTS} --moe-latent-size 0", "--moe-latent-size 0 is below 1. Use 1 or more."),
    (f"{EXPERTS} --moe-z-loss-coeff -1", "--moe-z-loss-coeff -1.0 is below 0. Use 0 or more."),
    (f"{EXPERTS} --moe-router-topk-scaling-factor 0", "--moe-router-topk-scaling-factor 0.0 is not above 0. Use a number above 0."),
    # data parallelism
    ("--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce. Add them, or leave it out."),
    ("--use-distributed-optimizer --overlap-param-gather --no-overlap-grad-reduce", "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce. Add them, or leave it out."),
    ("--pp 2 --pipeline-schedule zb-h1 --data-parallel-sharding-strategy optim_grads", "--pipeline-schedule zb-h1 splits the backward pass, which would bypass the gradient reduction of --data-parallel-sharding-strategy optim_grads. Use 1f1b, interleaved or gpipe; or optim."),
    ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "--data-parallel-sharding-strategy no_shard contradicts --use-distributed-optimizer. Use optim, or leave one of them out."),
    ("--no-use-distributed-optimizer --data-parallel-sharding-strategy optim", "--data-parallel-sharding-strategy optim contradicts --no-use-distributed-optimizer. Leave one of them out."),
    ("--use-distributed-optimizer --dp 4 --num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances 3 does not divide the data-parallel size 4. Use 1, 2 or 4."),
    ("--use-distributed-optimizer --num-distributed-optimizer-instances 0", "--num-distributed-optimizer-instances 0 is below 1. Use 1 or more."),
    (f"{EXPERTS} --ep 2 --use-distributed-optimizer --dp 4 --num-distributed-optimizer-instances 4", "--num-distributed-optimizer-instances 4 does not divide the 2 copies of each expert (edp). Use 1 or 2."),
    ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16 needs --bf16. Give it, or leave this out."),
    # recompute
    ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method and --recompute-num-layers. Common: --recompute-method uniform, 1 layer."),
    ("--recompute-activations --recompute-num-layers 1", "--recompute-num-layers applies to full recompute, but --recompute-granularity is selective. Use --recompute-granularity full, or leave it out."),
    ("--pp 2 --recompute-granularity full --recompute-method block --recompute-num-layers 3", "--recompute-num-layers 3 is more than the 2 layers of a pipeline stage. Use 2 or less."),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "--recompute-num-layers 0 is below 1. Use 1 or more."),
    ("--recompute-memory-budget-gb 0", "--recompute-memory-budget-gb 0.0 is not above 0. Use a number above 0."),
    ("--recompute-memory-budget-gb 2 --recompute-activations", "--recompute-memory-budget-gb 2 chooses what to recompute, and so does --recompute-granularity selective. Keep one of them."),
    # what a run tells, and what it reads
    ("--pipeline-timeline t.json --pipeline-timeline-step 101", "--pipeline-timeline-step 101 is after the last of --train-iters 100, so nothing would be written. Use 100 or less."),
    ("--pipeline-timeline t.json --train-iters 2", "--pipeline-timeline-step 3 (default) is after the last of --train-iters 2, so nothing would be written. Use 2 or less."),
    ("--pipeline-timeline t.json --pipeline-timeline-step 0", "--pipeline-timeline-step 0 is below 1. Use 1 or more."),
    ("--no-mock-data --data-path a --vocab-size 9 --reset-attention-mask", "--reset-attention-mask needs a tokenizer to know the end-of-document token. Give --tokenizer-model."),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_rule(flags: str, message: str):
    assert [str(problem) for problem in resolve_config([*BASE, *flags.split()])[1]] == [message]


@pytest.mark.parametrize(
    "flags",
    [
        "--cp 4 --cp-comm-type a2a",
        "--cp 2 --tp 2 --cp-comm-type a2a --num-query-groups 8",
        "--cp 2 --reset-attention-mask --window-size 32",
        "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax",
        "--num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        "--num-experts 1 --moe-router-topk 1",
        "--num-experts 8 --ep 4 --etp 1 --tp 2 --sequence-parallel --dp 2",
        "--num-experts 8 --ep 8 --etp 1 --tp 2 --sequence-parallel --cp 2 --pp 2 --dp 2",
        "--num-experts 8 --ep 2 --dp 2 --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap",
        "--num-experts 8 --ep 2 --dp 2 --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 8 --no-moe-shared-expert-overlap",
        "--num-experts 8 --ep 2 --dp 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        "--pp 2 --use-torch-fsdp2 --dp 2 --num-distributed-optimizer-instances 2",
        "--pp 2 --pipeline-schedule zb-v --use-distributed-optimizer --overlap-param-gather --dp 2",
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1 --global-batch-size 3",
        "--pp 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-activations --recompute-modules core_attn attention mlp",
        "--recompute-activations --recompute-modules layernorm --num-experts 8",
        "--recompute-memory-budget-gb 0.5",
        "--bf16 --grad-reduce-in-bf16",
    ],
)
def test_accepted_without_a_word(flags: str):
    loaded, problems = resolve_config([*BASE, *flags.split()])
    assert [str(problem) for problem in problems] == []
    assert loaded.notices == ()


DERIVED = [
    ("--pp 2", "parallel.pipeline_schedule", "1f1b", "there are no virtual stages"),
    ("--pp 2", "parallel.num_virtual_stages_per_pipeline_rank", 1, "no virtual stages were asked for"),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", "parallel.pipeline_schedule", "interleaved", "there are virtual stages"),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", "parallel.num_virtual_stages_per_pipeline_rank", 2, "layers per rank / layers per virtual stage"),
    ("--pp 2 --num-layers-per-virtual-pipeline-stage 1", "parallel.microbatch_group_size_per_virtual_pipeline_stage", 2, "the pipeline size"),
    ("--pp 2 --pipeline-schedule zb-v", "parallel.num_virtual_stages_per_pipeline_rank", 2, "zb-v passes every rank twice"),
    ("--pp 2 --pipeline-model-parallel-layout E|tt|tt|L", "parallel.num_virtual_stages_per_pipeline_rank", 2, "stages of the layout / pp"),
    ("--num-experts 8 --tp 2", "parallel.sequence_parallel", True, "with experts and tp every token must be routed by one rank only"),
    ("--tp 2 --sp --tp-comm-overlap", "parallel.tp_comm_overlap_chunks", 2, "one per 2,048 tokens, from 2 to 4"),
    ("--tp 2 --sp --tp-comm-overlap --seq-length 4096 --micro-batch-size 3 --cp 2", "parallel.tp_comm_overlap_chunks", 3, "one per 2,048 tokens, from 2 to 4"),
    ("--tp 2 --sp --tp-comm-overlap --seq-length 16384", "parallel.tp_comm_overlap_chunks", 4, "one per 2,048 tokens, from 2 to 4"),
    ("--cp 8 --cp-comm-type a2a+p2p", "parallel.hierarchical_context_parallel_sizes", (4, 2), "the most ranks that divide cp and a rank's key/value heads"),
    ("--cp 6 --seq-length 120 --cp-comm-type a2a+p2p", "parallel.hierarchical_context_parallel_sizes", (2, 3), "the most ranks that divide cp and a rank's key/value heads"),
    ("--cp 2 --tp 8 --cp-comm-type a2a+p2p", "parallel.hierarchical_context_parallel_sizes", (1, 2), "the most ranks that divide cp and a rank's key/value heads"),
    ("", "parallel.data_parallel_sharding_strategy", "no_shard", "--use-distributed-optimizer is not set"),
    ("--use-distributed-optimizer", "parallel.data_parallel_sharding_strategy", "optim", "--use-distributed-optimizer is set"),
    ("--data-parallel-sharding-strategy optim", "parallel.use_distributed_optimizer", True, "--data-parallel-sharding-strategy is optim"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "path", "value", "why"), DERIVED, ids=[f"{row[0]} {row[1]}" for row in DERIVED])
def test_derived(flags: str, path: str, value: object, why: str):
    loaded = load(flags)
    section, name = path.split(".")
    assert getattr(getattr(loaded.config, section), name) == value
    assert str(loaded.origins[path]) == f"derived: {why}"


@pytest.mark.parametrize(
    "switch",
    ["--use-torch-fsdp2", "--use-megatron-fsdp", "--use-megatron-fsdp-v2", "--use-custom-fsdp", "--use_torch_fsdp2"],
)
def test_the_switch_for_fsdp_leaves_the_strategy_to_its_own_flag(switch: str):
    assert load(switch).config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    for flags in (f"{switch} --data-parallel-sharding-strategy optim_grads", f"--data-parallel-sharding-strategy optim_grads {switch}"):  # fmt: skip
        assert load(flags).config.parallel.data_parallel_sharding_strategy == "optim_grads"


FULLY = "has no effect: fully_shard shares the optimizer state and gathers by itself"
NORMS = "--recompute-modules layernorm has no effect: what a norm makes is not kept here"
ALONE = "has no effect: no two ranks hold the same weights, as data-parallel ones do"
A2A = "--moe-token-dispatcher-type alltoall"
SHARED = "--moe-shared-expert-intermediate-size 8"
ALL_HERE = "has no effect: every rank holds all experts, and tokens stay where they are"
IDLE = [
    ("--tp-comm-overlap", "--tp-comm-overlap has no effect: the tensor-parallel size is 1"),
    ("--tp 2 --sp --tp-comm-overlap-chunks 3", "--tp-comm-overlap-chunks has no effect: it is for --tp-comm-overlap"),
    ("--cp-comm-type a2a", "--cp-comm-type has no effect: the context-parallel size is 1"),
    ("--pipeline-schedule gpipe", "--pipeline-schedule has no effect: the pipeline-parallel size is 1"),
    ("--account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split has no effect: the pipeline-parallel size is 1"),
    ("--pp 2 --microbatch-group-size-per-virtual-pipeline-stage 4", "--microbatch-group-size-per-virtual-pipeline-stage has no effect: it is for the interleaved schedule"),
    ("--dp 2 --num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances has no effect: no optimizer state is sharded"),
    ("--pp 4 --microbatch-group-size-per-virtual-pipeline-stage 2", "--microbatch-group-size-per-virtual-pipeline-stage has no effect: it is for the interleaved schedule"),
    ("--dp 2 --use-torch-fsdp2 --no-overlap-grad-reduce", "--no-overlap-grad-reduce has no effect: fully_shard reduces the gradients"),
    ("--dp 2 --use-torch-fsdp2 --use-distributed-optimizer", f"--use-distributed-optimizer {FULLY}"),
    ("--cp 2 --use-torch-fsdp2 --overlap-param-gather", f"--overlap-param-gather {FULLY}"),
    ("--use-distributed-optimizer", f"--use-distributed-optimizer {ALONE}"),
    ("--tp 2 --pp 2 --no-overlap-grad-reduce", f"--no-overlap-grad-reduce {ALONE}"),
    ("--ddp-bucket-size 1000", f"--ddp-bucket-size {ALONE}"),
    ("--use-torch-fsdp2", f"--use-torch-fsdp2 {ALONE}"),
    ("--tp 2 --etp 2", "--etp has no effect: the model has no experts"),
    (f"{EXPERTS} --no-moe-grouped-gemm --bf16 --device cpu", "--no-moe-grouped-gemm has no effect: the CPU multiplies for one expert after the other"),
    (f"{EXPERTS} --no-moe-grouped-gemm", "--no-moe-grouped-gemm has no effect: the grouped kernel takes bfloat16 (--bf16)"),
    (f"{EXPERTS} --no-moe-grouped-gemm --bf16 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", "--no-moe-grouped-gemm has no effect: inputs padded to capacity are one batched GEMM anyway"),
    (f"{EXPERTS} --no-moe-grouped-gemm --bf16 --fp8-hybrid", "--no-moe-grouped-gemm has no effect: experts in FP8 are one grouped GEMM anyway"),
    ("--moe-latent-size 8", "--moe-latent-size has no effect: the model has no experts"),
    (f"{EXPERTS} --moe-token-drop-policy position", "--moe-token-drop-policy has no effect: no token is dropped without --moe-expert-capacity-factor"),
    (f"{EXPERTS} --moe-router-group-score-topk 2", "--moe-router-group-score-topk has no effect: it is for --moe-router-group-topk"),
    (f"{EXPERTS} --moe-router-num-groups 2", "--moe-router-num-groups has no effect: it is for --moe-router-group-topk"),
    (f"{EXPERTS} --moe-shared-expert-gate", "--moe-shared-expert-gate has no effect: there is no shared expert"),
    (f"{EXPERTS} --moe-shared-expert-overlap", "--moe-shared-expert-overlap has no effect: there is no shared expert"),
    (f"{EXPERTS} {SHARED} --moe-shared-expert-overlap", f"--moe-shared-expert-overlap {ALL_HERE}"),
    (f"{EXPERTS} {SHARED} --no-moe-shared-expert-overlap", f"--no-moe-shared-expert-overlap {ALL_HERE}"),
    (f"{EXPERTS} {SHARED} --dp 2 --ep 2 --moe-shared-expert-overlap", "--moe-shared-expert-overlap has no effect: it is for --moe-token-dispatcher-type alltoall, and that is allgather"),
    (f"{EXPERTS} {A2A} --dp 2 --ep 2 --micro-batch-size 1 --global-batch-size 2 --overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm has no effect: a step has one micro-batch, and nothing to overlap it with"),
    (f"{EXPERTS} --moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate has no effect: it is for --moe-router-enable-expert-bias"),
    (f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-pre-softmax", "--moe-router-pre-softmax has no effect: scores are sigmoid"),
    (f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff has no effect: --moe-router-load-balancing-type is none"),
    ("--recompute-modules mlp", "--recompute-modules has no effect: it is for --recompute-granularity selective"),
    ("--recompute-activations --recompute-modules mlp moe_act", "--recompute-modules moe_act has no effect: the model has no experts"),
    ("--recompute-activations --recompute-modules mlp layernorm", NORMS),
    ("--recompute-activations --recompute-modules layernorm --tp 2 --sequence-parallel", NORMS),
    (f"{EXPERTS} --bf16 --moe-router-dtype fp32 --recompute-activations --recompute-modules layernorm", NORMS),
    (f"{EXPERTS} --moe-router-dtype fp64 --recompute-activations --recompute-modules layernorm", NORMS),
    (f"{EXPERTS} --moe-input-jitter-eps 0.1 --recompute-activations --recompute-modules layernorm", NORMS),
    (f"{EXPERTS} --recompute-activations --recompute-modules moe_act", "--recompute-modules moe_act has no effect: what an activation function makes is never kept"),
    (f"{EXPERTS} --recompute-activations --recompute-modules moe shared_experts", "--recompute-modules shared_experts has no effect: there is no shared expert"),
    ("--pipeline-timeline-step 5", "--pipeline-timeline-step has no effect: it is for --pipeline-timeline"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "notice"), IDLE, ids=[row[0] for row in IDLE])
def test_settings_without_effect_are_said_aloud(flags: str, notice: str):
    assert load(flags).notices == (notice,)


@pytest.mark.parametrize("flags", ["--dp 2", "--cp 2", f"{EXPERTS} --tp 2 --etp 1 --sp", f"{EXPERTS} --bf16 --no-moe-grouped-gemm --dp 2"])  # fmt: skip
def test_settings_with_effect_are_not(flags: str):
    """Copies of the weights lie on data- and context-parallel ranks; copies of experts on others too."""
    assert load(f"{flags} --use-distributed-optimizer --no-overlap-grad-reduce --ddp-bucket-size 1000").notices == ()


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 4),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([1, 2, 4]),
    instances=st.integers(1, 4),
)
def test_an_expert_layout_is_accepted_exactly_when_it_multiplies_out(
    tp: int, cp: int, pp: int, dp: int, ep: int, etp: int, instances: int
):
    flags = f"{EXPERTS} --tp {tp} --cp {cp} --pp {pp} --dp {dp} --ep {ep} --etp {etp} --use-distributed-optimizer"
    _, problems = resolve_config([*BASE, *flags.split(), "--num-distributed-optimizer-instances", str(instances)])
    fits = dp % instances == 0 and (dp // instances * cp * tp) % (ep * etp) == 0
    assert (problems == []) == fits


def test_what_sinkhorn_makes_idle_is_said():
    loaded = load("--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid")
    assert any("--moe-router-score-function" in notice and "sinkhorn" in notice for notice in loaded.notices)


def test_tensor_parallel_overlap_with_experts_needs_no_other_flag():
    assert load("--num-experts 8 --tp 2 --tp-comm-overlap").config.parallel.sequence_parallel


@pytest.mark.parametrize(
    "flag", ["--tp-comm-overlap-cfg f.yaml", "--disable-tp-comm-overlap-ag", "--disable-tp-comm-bulk-wgrad"]
)
def test_tensor_parallel_overlap_by_part_is_a_notice(flag: str):
    loaded, problems = resolve_config([*BASE, *f"--tp 2 --sp --tp-comm-overlap {flag}".split()])
    assert problems == [] and flag in loaded.notices[0]


def test_a_setting_of_a_file_without_effect_is_named_with_its_line(tmp_path: Path):
    """Nobody typed a flag for it: it may have come with the preset of the run that wrote the file."""
    (tmp_path / "config.yaml").write_text("optim:\n  optimizer: sgd\n  adam_beta2: 0.95\n")
    [notice] = load(f"--config {tmp_path / 'config.yaml'}").notices
    assert notice == f"adam_beta2 ({tmp_path / 'config.yaml'}:3) has no effect: the optimizer is sgd"


def test_sequence_parallelism_that_nobody_asked_for_is_said():
    assert any(n.startswith("sequence parallelism is on") for n in load("--num-experts 8 --tp 2").notices)
    for flags in ("--num-experts 8 --tp 2 --sequence-parallel", "--num-experts 8", "--tp 2"):
        assert not any("sequence parallelism is on" in notice for notice in load(flags).notices)
