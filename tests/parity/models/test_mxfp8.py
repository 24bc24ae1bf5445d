"""MXFP8 trains the same model in every layout: scales are powers of two, so that few numbers depend on what shares a block."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.models.fp8_linears import check_fp8_linears
from tests.parity.state.test_resume import ITERATIONS, STOP, trained

SIZES = "--hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 --fp8-format e4m3 --fp8-recipe mxfp8"
EXPERTS = f"{SIZES} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
WEIGHTS = [
    f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("attention.qkv", "attention.out", "mlp.gate_up")
]
OF_EXPERTS = [f"layers.{layer}.attention.{name}.weight" for layer in (0, 1) for name in ("qkv", "out")]
BOUND = 1e-5
"""Of losses, gradients and weights. Which tokens share a block depends on their order in memory, and on shards. Another scale rounds the
smallest numbers of a block otherwise, those below 2^-14 of its largest."""


@diagonal(3)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("--tp 2 --sequence-parallel", SIZES),
        ("--pp 2", SIZES),
        ("--dp 2 --data-parallel-sharding-strategy optim_grads_params", SIZES),
        later("--tp 2", SIZES),
        later("--dp 2 --use-distributed-optimizer --fp8-param-gather", SIZES),
        later("--cp 2", SIZES),
        ("--ep 2", EXPERTS),
        later("--tp 2 --ep 2 --etp 1 --sequence-parallel", EXPERTS),
    ],
)
def test_a_layout_trains_the_same_model(ranks: RankPool, layout: str, model: str):
    check_fp8_linears(ranks, model, OF_EXPERTS if model == EXPERTS else WEIGHTS, layout=layout, bound=BOUND)


@pytest.mark.parametrize("layout", ["--tp 2 --sequence-parallel", later("--pp 2")])
def test_the_same_blocks_give_the_same_numbers(ranks: RankPool, layout: str):
    """Of one sample tokens have one order: no scale differs, since shards are whole blocks."""
    check_fp8_linears(ranks, f"{SIZES} --micro-batch-size 1", WEIGHTS, layout=layout)


@pytest.mark.parametrize("layout", ["", later("--tp 2 --sequence-parallel")])
def test_a_run_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path, layout: str):
    """Scales come from the tensors themselves: there is nothing to save."""
    flags, world_size = f"--bf16 {SIZES} {layout}", 2 if layout else 1
    whole = trained(ranks, flags, world_size)
    save = f"{flags} --save {tmp_path}"
    before = trained(ranks, f"{save} --exit-interval {STOP}", world_size)
    after = trained(ranks, f"{save} --load {tmp_path}", world_size)
    for ours, first, wanted in zip(after, before, whole, strict=True):
        assert {**first[0], **ours[0]} == wanted[0] and len(wanted[0]) == ITERATIONS
        assert all(ours[1][key].equal(tensor) for key, tensor in wanted[1].items())
