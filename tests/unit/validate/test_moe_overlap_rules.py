"""Rules about `--overlap-moe-expert-parallel-comm`: what it needs and what it cannot have, all at once."""

# ruff: noqa: E501  (a table of whole messages reads better unwrapped)

from __future__ import annotations

import shlex

import pytest

from petatron.validate import resolve_config
from petatron.validate.moe import MOE_OVERLAP_FLAG

BASE = shlex.split(
    f"--preset tiny-llama --mock-data --lr 1e-3 --train-iters 100 --global-batch-size 16 {MOE_OVERLAP_FLAG}"
)
EXPERTS = "--num-experts 4 --dp 2 --ep 2 --moe-token-dispatcher-type alltoall"
AGAIN = "which would repeat the all-to-all in the backward pass, with random states and hooks set back around it"


def messages(flags: str) -> list[str]:
    _, problems = resolve_config([*BASE, *shlex.split(flags)])
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        "--pp 2",
        "--ep 1 --etp 2",
        "--tp 2 --etp 1",
        "--use-distributed-optimizer --overlap-param-gather",
        "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.01",
        "--recompute-activations",
        "--recompute-activations --recompute-modules core_attn shared_experts --moe-shared-expert-intermediate-size 8",
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        "--bf16 --fp8-hybrid",
        "--optimizer-cpu-offload",
    ],
)
def test_accepted(flags: str):
    assert messages(f"{EXPERTS} {flags}") == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "needs --num-experts: a dense model has no expert all-to-all. Leave it out."),
        ("--num-experts 4 --moe-token-dispatcher-type alltoall", "needs --expert-model-parallel-size above 1: else no token is sent anywhere. Leave it out, or use 2 or more."),
        (f"{EXPERTS} --moe-token-dispatcher-type allgather", "needs --moe-token-dispatcher-type alltoall, but that is allgather. Use alltoall, or leave this out."),
        (f"{EXPERTS} --pp 2 --pipeline-schedule gpipe", "cannot be combined with --pipeline-schedule gpipe, which does not run forwards and backwards in turn. Use 1f1b or interleaved, or leave one of them out."),
        (f"{EXPERTS} --pp 2 --pipeline-schedule zb-h1", "cannot be combined with --pipeline-schedule zb-h1, which does not run forwards and backwards in turn. Use 1f1b or interleaved, or leave one of them out."),
        (f"{EXPERTS} --pp 2 --num-layers 4 --pipeline-schedule zb-v", "cannot be combined with --pipeline-schedule zb-v, which does not run forwards and backwards in turn. Use 1f1b or interleaved, or leave one of them out."),
        (f"{EXPERTS} --pipeline-timeline found.json", "cannot be combined with --pipeline-timeline: two passes that run in turns have no times of their own. Leave one of them out."),
        (f"{EXPERTS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", f"cannot be combined with --recompute-granularity full, {AGAIN}. Use selective recompute without moe."),
        (f"{EXPERTS} --recompute-activations --recompute-modules core_attn moe", f"cannot be combined with --recompute-modules moe, {AGAIN}. Use moe_act, shared_experts or others."),
        (f"{EXPERTS} --recompute-memory-budget-gb 9", "cannot be combined with --recompute-memory-budget-gb, which may choose to recompute layers with their all-to-all. Use selective recompute without moe."),
        (f"{EXPERTS} --cpu-offloading-num-layers 1", "cannot be combined with --cpu-offloading-num-layers, whose copies follow one pass from layer to layer. Leave one of them out."),
        (f"{EXPERTS} --data-parallel-sharding-strategy optim_grads", "cannot be combined with --data-parallel-sharding-strategy optim_grads: one pass would free the weights of a layer while the other is in it. Use optim (--use-distributed-optimizer), or leave one of them out."),
        (f"{EXPERTS} --use-torch-fsdp2", "cannot be combined with --data-parallel-sharding-strategy optim_grads_params: one pass would free the weights of a layer while the other is in it. Use optim (--use-distributed-optimizer), or leave one of them out."),
    ],
)  # fmt: skip
def test_refused(flags: str, message: str):
    assert messages(flags) == [f"{MOE_OVERLAP_FLAG} {message}"]


def test_all_reasons_are_told_at_once():
    found = messages(f"{EXPERTS} --moe-token-dispatcher-type allgather --use-torch-fsdp2 --cpu-offloading-num-layers 1")
    assert len(found) == 3


def test_cuda_graphs_are_refused_by_their_own_rule():
    found = messages(
        f"{EXPERTS} --bf16 --cuda-graphs --no-overlap-grad-reduce --hidden-dropout 0 --attention-dropout 0"
    )
    assert [reason.split(": ")[1].split(".")[0] for reason in found] == [
        "two threads launch its kernels in turns",
        "the host must know how many rows a rank gets",
    ]


def test_without_the_flag_nothing_is_refused():
    _, problems = resolve_config([*BASE, *shlex.split(f"{EXPERTS} --use-torch-fsdp2"), f"--no-{MOE_OVERLAP_FLAG[2:]}"])
    assert problems == []
