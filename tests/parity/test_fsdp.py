"""Fully sharded layouts train the same model as one process, alone and with every other kind of parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist import RankPool
from tests.longform import every_second
from tests.parity.harness import check_layout
from tests.parity.state.test_resume import trained

# The default suite has the core of these in test_matrix.py.
pytestmark = pytest.mark.matrix

ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
SHORT = "--train-iters 3"
DEEP = f"{SHORT} --num-layers 4"
TIED = f"{SHORT} --no-untie-embeddings-and-output-weights"
EXPERTS = f"{SHORT} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 1e-2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"


def test_twenty_steps_in_single_precision(ranks: RankPool):
    check_layout(ranks, f"--dp 2 {ZERO3}", "--train-iters 8", world_size=2, dtype="float32")


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (f"--dp 2 {ZERO2}", 2),
        (f"--dp 4 {ZERO3}", 4),
        (f"--dp 4 --num-distributed-optimizer-instances 2 {ZERO3}", 4),
    ],
)
def test_data_parallel(ranks: RankPool, layout: str, world_size: int):
    check_layout(ranks, layout, SHORT, world_size=world_size)


@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    every_second(
        [
            (f"--dp 2 --tp 2 {ZERO2}", TIED, 4),
            (f"--dp 2 --tp 2 --sequence-parallel {ZERO3}", SHORT, 4),
            (f"--dp 2 --cp 2 {ZERO3}", SHORT, 4),
            (f"--cp 2 {ZERO2}", SHORT, 2),
            (f"--dp 2 --pp 2 {ZERO2}", TIED, 4),
            (f"--dp 2 --pp 2 {ZERO3}", SHORT, 4),
            (f"--dp 2 --pp 2 --pipeline-schedule gpipe {ZERO3}", SHORT, 4),
            (f"--dp 2 --pp 2 --num-virtual-stages-per-pipeline-rank 2 {ZERO3}", DEEP, 4),
            (f"--dp 2 --ep 2 {ZERO3}", EXPERTS, 2),
            (f"--dp 4 --ep 2 {ZERO3}", EXPERTS, 4),
            (f"--dp 4 --ep 2 --num-distributed-optimizer-instances 2 {ZERO2}", EXPERTS, 4),
            (f"--tp 2 {ZERO3}", SHORT, 2),
        ]
    ),
)
def test_with_another_kind(ranks: RankPool, layout: str, model: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize(
    ("layout", "model", "world_size"),
    [
        (f"--dp 2 --tp 2 --pp 2 --sequence-parallel {ZERO3}", TIED, 8),
        (f"--dp 2 --pp 2 --ep 2 {ZERO3}", EXPERTS, 4),
    ],
)
def test_with_two_other_kinds(ranks: RankPool, layout: str, model: str, world_size: int):
    check_layout(ranks, layout, model, world_size=world_size)


@pytest.mark.parametrize(
    ("recompute", "model"),
    every_second(
        [
            (f"{RECOMPUTE} 1", SHORT),
            (f"{RECOMPUTE} 2", DEEP),
            (f"{RECOMPUTE} 1", EXPERTS),
            ("--recompute-granularity selective --recompute-modules core_attn mlp layernorm", SHORT),
            ("--recompute-granularity selective --recompute-modules moe", EXPERTS),
        ]
    ),
)
def test_with_recompute(ranks: RankPool, recompute: str, model: str):
    check_layout(ranks, f"--dp 2 {ZERO3} {recompute}", model, world_size=2)


@pytest.mark.parametrize("strategy", [ZERO2, ZERO3])
def test_a_stopped_run_goes_on_bitwise(ranks: RankPool, tmp_path: Path, strategy: str):
    """With evaluations between, which leave parameters gathered."""
    flags = f"--dp 2 {strategy} --eval-interval 2 --eval-iters 1"
    whole = trained(ranks, flags, 2)
    save = f"{flags} --save {tmp_path}"
    before = trained(ranks, f"{save} --exit-interval 3", 2)
    after = trained(ranks, f"{save} --load {tmp_path}", 2)
    for rank in range(2):
        assert {**before[rank][0], **after[rank][0]} == whole[rank][0]
        for key, tensor in whole[rank][1].items():
            assert torch.equal(after[rank][1][key], tensor), key


@pytest.mark.parametrize(("first", "then"), [(f"--dp 2 {ZERO3}", ""), ("", f"--dp 2 {ZERO3}")])
def test_a_checkpoint_moves_to_another_sharding(ranks: RankPool, tmp_path: Path, first: str, then: str):
    quiet = "--hidden-dropout 0 --attention-dropout 0"
    sizes = {layout: 2 if layout else 1 for layout in (first, then)}
    whole = trained(ranks, quiet, 1, "float64")
    trained(ranks, f"{quiet} {first} --save {tmp_path} --exit-interval 3", sizes[first], "float64")
    after = trained(ranks, f"{quiet} {then} --load {tmp_path}", sizes[then], "float64")
    for iteration, loss in after[0][0].items():
        assert loss == pytest.approx(whole[0][0][iteration], rel=1e-9)
    assert min(after[0][0]) == 4
