"""Two micro-batches whose expert communication overlaps train the same model as one process, and the same bits as without overlap."""

from __future__ import annotations

import pytest
import torch

from petatron.verify.record_trace import StepTrace
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_layout, tiny_run, train

OVERLAP = "--overlap-moe-expert-parallel-comm"
EXPERTS = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 16 --moe-layer-freq [0,1,1,1]"
)
VIRTUAL = "--pp 2 --num-virtual-stages-per-pipeline-rank 2"
LAYOUTS = {
    "ep2": ("--dp 2 --ep 2", 2),
    "ep4": ("--dp 4 --ep 4", 4),
    "dp4-ep2": ("--dp 4 --ep 2 --use-distributed-optimizer --overlap-param-gather", 4),
    "tp2-sp-ep2": ("--tp 2 --dp 2 --ep 2 --expert-tensor-parallel-size 1", 4),
    "tp2-etp2": ("--tp 2 --expert-tensor-parallel-size 2", 2),
    "pp2": ("--pp 2 --dp 2 --ep 2", 4),
    "pp2-vpp2": (f"{VIRTUAL} --dp 2 --ep 2", 4),
    "pp4": ("--pp 4 --dp 2 --ep 2", 8),
}
# The core of `test_matrix.py` has ep2 and pp2-vpp2.
CASES = [("pp2", 5) if (name, count) == ("pp2", 5) else later(name, count) for name in LAYOUTS for count in (1, 2, 5)]


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "micro_batches"), CASES)
def test_layout(ranks: RankPool, layout: str, micro_batches: int):
    flags, world_size = LAYOUTS[layout]
    dp = int(flags.partition("--dp ")[2][:1] or 1)
    batch = f"--train-iters 2 --micro-batch-size 1 --global-batch-size {dp * micro_batches}"
    check_layout(ranks, f"{flags} {OVERLAP}", f"{EXPERTS} {batch}", world_size=world_size)


def same_bits(found: list[list[StepTrace]], expected: list[list[StepTrace]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert one.loss == two.loss and one.grad_norm == two.grad_norm
            for a, b in zip(one.shards, two.shards, strict=True):
                assert torch.equal(a.values, b.values), a.name


DRAWS = "--hidden-dropout 0.2 --attention-dropout 0.1 --moe-input-jitter-eps 0.05"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FORMS = {
    "random numbers": ("ep2", DRAWS),
    "random numbers in a pipeline": ("pp2-vpp2", DRAWS),
    "recompute": ("ep2", f"{DRAWS} {SELECTIVE} core_attn layernorm shared_experts"),
    "attention recomputed": ("tp2-sp-ep2", f"{DRAWS} {SELECTIVE} attention"),
    "capacity": ("ep2", "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"),
    "fp8": ("ep2", "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
    "shared expert apart": ("ep2", "--no-moe-shared-expert-overlap"),
    "gate and latent": ("ep2", "--moe-shared-expert-gate --moe-latent-size 8"),
    "reduced afterwards": ("dp4-ep2", "--no-overlap-grad-reduce --no-overlap-param-gather"),
}
SHORT = ("random numbers in a pipeline", "recompute")


@diagonal(2)
@pytest.mark.parametrize("form", [form if form in SHORT else later(form) for form in FORMS])
def test_overlap_changes_no_bit(ranks: RankPool, form: str):
    """Forwards and backwards keep their order, so sums and random numbers do."""
    layout, flags = FORMS[form]
    where, world_size = LAYOUTS[layout]
    words = f"{EXPERTS} --train-iters 2 --lr-warmup-iters 1 --micro-batch-size 1 --global-batch-size 8 {where} {flags}"
    without, overlapped = (
        ranks.run(train, world_size, tiny_run(f"{words} {overlap}", world_size=world_size)) for overlap in ("", OVERLAP)
    )
    same_bits(overlapped, without)
