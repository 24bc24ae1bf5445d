"""What fully sharded parameters cost in communication, event by event.

A unit (a block, the experts of one, the embedding, the rest of a stage) travels in one message. With r(n) = n rounded up to
a multiple of the ranks R that share it, a parameter [rows, ...] counts r(rows) x the rest, or r(size) of the first dimension
that R divides where it has fewer rows than R (nothing is rounded then). m micro-batches of one step cost, per unit:

                       gathers, in the precision of the run          reduce-scatters, in fp32 or bf16
    optim_grads        1                                             m
    optim_grads_params 2 m of a block or experts                     m
                       m of the embedding (none for its backward)
                       m of the rest of the stage: what is kept from forward to backward. With several micro-batches
                       in flight, once whenever it is needed after a backward pass let it go

and with hybrid sharding one all-reduce over the replicas of each of the two gradient buffers (decayed or not) of a stage.
"""

from __future__ import annotations

from collections import Counter

import pytest

from petatron.config import RunConfig
from petatron.schedule.actions import COMPUTE_KINDS, ActionKind
from petatron.schedule.pipeline_plan import pipeline_plan
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.communication.test_communication import second_step
from tests.parity.harness import tiny_run

H, FFN, ROWS = 32, 48, 136  # hidden, feed-forward, vocabulary rows of 131 in multiples of 8
AXES = ("shard", "edp_shard", "dp_outer")
Key = tuple[str, str, int, int]
"""axis, operation, elements, bytes"""

ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24"


def step(ranks: RankPool, flags: str, *, world_size: int, batch: int) -> tuple[RunConfig, list[Counter[Key]]]:
    """The events of a step on every rank."""
    always = "--train-iters 2 --lr-warmup-iters 0 --moe-router-load-balancing-type none"
    run = tiny_run(f"{always} --global-batch-size {batch} {flags}", world_size=world_size)
    found = [[event for event in one.all if event.axis in AXES] for one in ranks.run(second_step, world_size, run)]
    return run, [Counter((e.axis, e.op, e.elements, e.bytes) for e in events) for events in found]


def part(rows: int, rest: int, ranks: int) -> int:
    """Elements of a parameter in a message."""
    return -(-rows // ranks) * ranks * rest


def attention(ranks: int) -> int:
    return part(3 * H, H, ranks) + part(H, H, ranks) + 2 * part(H, 1, ranks)  # qkv, out, both norms


def block(ranks: int) -> int:
    return attention(ranks) + part(2 * FFN, H, ranks) + part(H, FFN, ranks)


def times(op: str, count: int, elements: int, *, itemsize: int = 4, axis: str = "shard") -> Counter[Key]:
    return Counter({(axis, op, elements, elements * itemsize): count})


def unit(elements: int, gathers: int, scatters: int, *, gather: int = 4, reduce: int = 4, axis: str = "shard"):
    """What one unit costs; itemsizes of what is gathered and reduced."""
    return times("all_gather", gathers, elements, itemsize=gather, axis=axis) + times(
        "reduce_scatter", scatters, elements, itemsize=reduce, axis=axis
    )


@diagonal(2)
@pytest.mark.parametrize(("dp", "batch", "m"), [(2, 12, 3), (3, 12, 2)], ids=["even", "uneven"])
def test_zero3(ranks: RankPool, dp: int, batch: int, m: int):
    _, found = step(ranks, f"--dp {dp} {ZERO3}", world_size=dp, batch=batch)
    vocabulary, norm = part(ROWS, H, dp), part(H, 1, dp)
    expected = unit(vocabulary, m, m) + unit(norm + vocabulary, m, m) + unit(block(dp), 2 * 2 * m, 2 * m)
    assert found == [expected] * dp
    if dp == 2:  # nothing to round: two blocks twice, the rest once
        whole = 2 * ROWS * H + H + 2 * block(1)
        gathered = sum(n * key[2] for key, n in expected.items() if key[1] == "all_gather")
        assert gathered == m * (whole + 2 * block(1))


@pytest.mark.parametrize(("dp", "batch", "m"), [(2, 12, 3), (3, 12, 2)], ids=["even", "uneven"])
def test_zero2(ranks: RankPool, dp: int, batch: int, m: int):
    _, found = step(ranks, f"--dp {dp} {ZERO2}", world_size=dp, batch=batch)
    vocabulary, norm = part(ROWS, H, dp), part(H, 1, dp)
    expected = unit(vocabulary, 1, m) + unit(norm + vocabulary, 1, m) + unit(block(dp), 2, 2 * m)
    assert found == [expected] * dp


def test_a_tied_embedding_stays_with_the_head(ranks: RankPool):
    flags = f"--dp 2 {ZERO3} --no-untie-embeddings-and-output-weights"
    _, found = step(ranks, flags, world_size=2, batch=8)
    assert found == [unit(ROWS * H + H, 2, 2) + unit(block(2), 2 * 2 * 2, 2 * 2)] * 2


@pytest.mark.parametrize(("wire", "itemsize"), [("", 4), ("--grad-reduce-in-bf16", 2)])
def test_precision_on_the_wire(ranks: RankPool, wire: str, itemsize: int):
    _, found = step(ranks, f"--dp 2 --bf16 {wire} {ZERO3}", world_size=2, batch=8)
    sent = [(ROWS * H, 2, 2), (H + ROWS * H, 2, 2), (block(2), 8, 4)]
    expected = sum((unit(*counts, gather=2, reduce=itemsize) for counts in sent), Counter())
    assert found == [expected] * 2


def test_replicas_of_shards_add_up_once(ranks: RankPool):
    flags = f"--dp 4 --num-distributed-optimizer-instances 2 {ZERO3}"
    _, found = step(ranks, flags, world_size=4, batch=16)
    norms = 5 * H
    whole = 2 * ROWS * H + H + 2 * block(1)
    expected = unit(ROWS * H, 2, 2) + unit(H + ROWS * H, 2, 2) + unit(block(2), 8, 4)
    for buffer in (norms, whole - norms):
        expected += times("all_reduce", 1, buffer // 2, axis="dp_outer")
    assert found == [expected] * 4


@diagonal(2)
@pytest.mark.parametrize(("ep", "here"), [(2, 4), (1, 8)])
def test_experts_travel_over_their_own_ranks(ranks: RankPool, ep: int, here: int):
    """8 experts on 4 ranks: with ep 2, two ranks share the same 4 experts."""
    _, found = step(ranks, f"--dp 4 --ep {ep} {ZERO3} {EXPERTS}", world_size=4, batch=8)
    share = 4 // ep
    experts = here * (2 * 24 * H + H * 24)
    dense = attention(4) + part(8, H, 4)  # with the router
    expected = unit(ROWS * H, 1, 1) + unit(H + ROWS * H, 1, 1) + unit(dense, 2 * 2, 2)
    assert here % share == 0
    assert found == [expected + unit(experts, 2 * 2, 2, axis="edp_shard")] * 4


def test_few_experts_are_cut_inside(ranks: RankPool):
    """2 experts on 4 ranks: whole experts would be padded to 4, so each is cut."""
    _, found = step(ranks, f"--dp 4 {ZERO3} {EXPERTS} --num-experts 2", world_size=4, batch=8)
    experts = 2 * (2 * 24 * H + H * 24)
    assert {key[2] for key in found[0] if key[0] == "edp_shard"} == {experts}


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


@diagonal(2)
@pytest.mark.parametrize(("virtual", "recompute"), [(1, RECOMPUTE), (2, ""), later(1, ""), later(2, RECOMPUTE)])
def test_every_stage_of_a_pipeline(ranks: RankPool, virtual: int, recompute: str):
    """8 layers on 2 ranks, 4 micro-batches in flight: no unit is gathered for a micro-batch that does not need it."""
    flags = f"--pp 2 --num-virtual-stages-per-pipeline-rank {virtual}" if virtual > 1 else "--pp 2"
    run, found = step(ranks, f"--dp 2 {flags} --num-layers 8 {ZERO3} {recompute}", world_size=4, batch=16)
    m, schedule = 4, pipeline_plan(run).training_schedule(4, rank=1)
    actions = [action for batch in schedule.action_batches() for action in batch]
    last = [a for a in actions if a.stage == schedule.stages - 1 and a.kind in COMPUTE_KINDS]
    needed_anew = sum(before is None or before.kind is not ActionKind.FORWARD for before in [None, *last[:-1]])
    blocks = unit(block(2), 4 * 2 * m, 4 * m)
    assert found[:2] == [unit(ROWS * H, m, m) + blocks] * 2
    assert found[2:] == [unit(H + ROWS * H, needed_anew, m) + blocks] * 2
