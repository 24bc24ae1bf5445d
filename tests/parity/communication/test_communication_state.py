"""What pipelines and sharded optimizer state send is what theory says.

Pipeline: every boundary between ranks carries one activation of s x b x h elements forward and one gradient back for each
micro-batch; with sequence parallelism 1/tp of it on each rank, with context parallelism 1/cp. A tied embedding is summed
over both ends once per step. Every rank then learns the loss.

Distributed optimizer over d ranks with P parameters: gradients are reduce-scattered once (P elements in fp32, (d-1)/d of
them over the wire), updated weights gathered once (P elements in the model's precision).
"""

from collections import Counter

import pytest
import torch

from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.communication.test_communication import H, S, StepEvents, all_step_events

LAYERS = 4


def transfers(found: StepEvents) -> Counter[tuple[str, int]]:
    return Counter((e.op, e.elements) for e in found.forward_and_backward if e.axis == "pp")


@diagonal(2)
@pytest.mark.parametrize(
    ("flags", "virtual"),
    [
        ("--pp 2", 1),
        later("--pp 2 --pipeline-schedule gpipe", 1),
        ("--pp 2 --pipeline-schedule zb-h1", 1),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pp 4", 1),
    ],
)
def test_a_boundary_carries_one_activation_each_way_per_micro_batch(ranks: RankPool, flags: str, virtual: int):
    pp, m, b = int(flags.split()[1]), 4, 2
    every = all_step_events(ranks, flags, world_size=pp, model=f"--num-layers {LAYERS}")
    boundaries = pp * virtual - 1
    total = sum((transfers(found) for found in every), Counter())
    assert total == {("send", S * b * H): 2 * m * boundaries, ("receive", S * b * H): 2 * m * boundaries}
    for rank, found in enumerate(every):
        out = sum(1 for stage in range(rank, pp * virtual, pp) if stage < pp * virtual - 1)  # forward
        back = sum(1 for stage in range(rank, pp * virtual, pp) if stage > 0)
        assert transfers(found)[("send", S * b * H)] == m * (out + back)
        others = [(e.axis, e.op, e.elements) for e in found.forward_and_backward if e.axis != "pp"]
        assert others == [("world", "all_reduce", 1)], "nothing else is said but the loss"


def test_two_stages_of_one_rank_hand_over_without_a_message(ranks: RankPool):
    """zb-v turns round on the last rank: 3 boundaries between 4 stages, one of them inside a rank."""
    flags = "--pp 2 --pipeline-schedule zb-v"
    every = all_step_events(ranks, flags, world_size=2, model=f"--num-layers {LAYERS}")
    assert sum((transfers(found) for found in every), Counter())[("send", S * 2 * H)] == 2 * 4 * 2


def test_every_axis_takes_its_part_of_what_passes(ranks: RankPool):
    for flags, parts in (("--pp 2 --tp 2", 1), ("--pp 2 --tp 2 --sequence-parallel", 2), ("--pp 2 --cp 2", 2)):
        for found in all_step_events(ranks, flags, world_size=4, model=f"--num-layers {LAYERS}"):
            assert set(transfers(found)) == {("send", S * 2 * H // parts), ("receive", S * 2 * H // parts)}, flags


def test_half_precision_halves_what_passes(ranks: RankPool):
    for found in all_step_events(ranks, "--pp 2 --bf16", world_size=2, model=f"--num-layers {LAYERS}"):
        assert {e.dtype for e in found.forward_and_backward if e.axis == "pp"} == {torch.bfloat16}


def test_a_tied_embedding_is_summed_over_both_ends_once(ranks: RankPool):
    model = f"--num-layers {LAYERS} --no-untie-embeddings-and-output-weights"
    first, *middle, last = all_step_events(ranks, "--pp 4", world_size=4, model=model)
    rows = 131  # of logical elements: padding rows are nobody's
    for found in (first, last):
        assert [(e.op, e.elements) for e in found.forward_and_backward if e.axis == "ends"] == [
            ("all_reduce", rows * H)
        ]
    assert not any(e.axis == "ends" for found in middle for e in found.forward_and_backward)


@diagonal(2)
@pytest.mark.parametrize(
    ("bucket_size", "precision", "gather"),
    [
        (1, "", ""),
        (3000, "--bf16", "--overlap-param-gather"),
        (10**9, "--bf16 --grad-reduce-in-bf16", ""),
        later(3000, "", "--overlap-param-gather"),
        later(1, "--bf16", ""),
    ],
)
def test_distributed_optimizer(ranks: RankPool, bucket_size: int, precision: str, gather: str):
    flags = f"--dp 2 --use-distributed-optimizer --ddp-bucket-size {bucket_size} {precision} {gather}"
    for found in all_step_events(ranks, flags, world_size=2):
        reduced, gathered = (
            [e for e in found.all if (e.axis, e.op) == ("shard", op)] for op in ("reduce_scatter", "all_gather")
        )
        assert sum(e.elements for e in reduced) == sum(e.elements for e in gathered) == found.padded
        assert found.parameters <= found.padded <= found.parameters + len(reduced) * (2 * 64 - 1)
        assert {e.dtype for e in reduced} == {torch.bfloat16 if "grad-reduce" in precision else torch.float32}
        assert {e.dtype for e in gathered} == {torch.bfloat16 if precision else torch.float32}
        others = Counter((e.axis, e.op, e.elements) for e in found.all if e not in reduced and e not in gathered)
        assert others == {
            ("world", "all_reduce", 1): 3,  # tokens, loss, gradient norm
        }
        assert (len(reduced) == 2) == (bucket_size == 10**9), "one bucket each for decayed and undecayed weights"


def test_instances_of_the_distributed_optimizer_sum_their_parts(ranks: RankPool):
    """dp 4 as 2 instances of 2: scatter inside an instance, all-reduce of the owned half between them."""
    flags = "--dp 4 --micro-batch-size 1 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    for found in all_step_events(ranks, flags, world_size=4):
        total = Counter()
        for event in found.all:
            total[event.axis, event.op] += event.elements if event.elements > 1 else 0
        assert total[("shard", "reduce_scatter")] == total[("shard", "all_gather")] == found.padded
        assert total[("dp_outer", "all_reduce")] == found.padded // 2
        assert not total[("dp_cp", "all_reduce")]


def test_experts_are_reduced_over_their_own_axis(ranks: RankPool):
    """dp 4 with ep 2: an expert has two copies, everything else four."""
    flags = "--dp 4 --ep 2 --micro-batch-size 1"
    model = "--num-experts 4 --moe-ffn-hidden-size 24"
    for found in all_step_events(ranks, flags, world_size=4, model=model):
        experts = 2 * 2 * 3 * H * 24  # layers, local experts, matrices
        over = Counter()
        for event in found.forward_and_backward:
            if event.op == "all_reduce" and event.elements > 1 and event.axis in ("edp", "dp_cp"):
                over[event.axis] += event.elements
        assert over == {"edp": experts, "dp_cp": found.parameters - experts}
