"""Weights that travel in eight bits: the run is the same to the bit, and they take half the bytes.

Sizes are such that ranks cut weights inside rows and squares: buckets hold matrices of different sizes and are shared equally.
Weights spread over many binary orders, so that some are tiny beside the largest of their scale, and the largest of some is
rounded down to half of what its scale takes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import stable_seed
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.train.build_run import build_loader, build_model
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run
from tests.parity.state.test_resume import trained

GATHER = "--fp8-param-gather"
ZERO1, ZERO2, ZERO3 = (
    f"--data-parallel-sharding-strategy {name}" for name in ("optim", "optim_grads", "optim_grads_params")
)
ODD = "--hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 3"
SQUARES = (
    "--hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 2 --seq-length 128 --fp8-recipe blockwise "
    "--global-batch-size 4 --micro-batch-size 1 --num-layers 1"
)
THREE = "--num-layers 3 --first-last-layers-bf16"
LAYERS, VOCABULARY = 2, 136


@dataclass(frozen=True)
class Outcome:
    """What a rank computed, what it owns in the end, and what its last step sent.

    rounded: of the weights it owns, how many are not the same where they are computed with.
    """

    numbers: list[tuple[float, float]]
    evaluated: float
    state: dict[str, Tensor]
    events: list[CommEvent]
    rounded: int


def run_of(flags: str, world_size: int) -> RunConfig:
    fp8 = "" if "--fp8-format" in flags else "--fp8-hybrid"
    common = f"--bf16 {fp8} --train-iters 3 --lr-warmup-iters 0 --num-layers {LAYERS}"
    return tiny_run(f"{common} {flags}", world_size=world_size)


@torch.no_grad()
def _spread_out(model: ParallelModel) -> None:
    """Over twenty binary orders, up to a largest that loses its last digits."""
    for group in model.param_groups:
        for piece, view in group_tensor_shards(group, group.weights()):
            if len(piece.shape) == 2:
                generator = torch.Generator().manual_seed(stable_seed(piece.name, piece.start) % 2**31)
                view.mul_(torch.exp2(-20 * torch.rand(view.shape, generator=generator) ** 6)).clamp_(-0.5, 0.5)
                view.flatten()[0] = 0.5 * 225 / 224  # e4m3 has 224 and 240
    model.all_gather_params()


def _train(run: RunConfig) -> Outcome:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    _spread_out(model)
    state = TrainState.build(run, mesh, model=model)
    numbers, before, batches = [], 0, []
    for batches in build_loader(run, mesh):
        before = mesh.record.count
        metrics = train_step(state, batches)
        numbers.append((float(metrics.loss), float(metrics.grad_norm or math.nan)))
    events = mesh.record.events(since=before)
    return Outcome(numbers, float(model.evaluate(batches)[0]), _owned(state), events, _rounded(model))


def _owned(state: TrainState) -> dict[str, Tensor]:
    weights = (
        (f"weight {p.name} {p.start}", v)
        for g in state.model.param_groups
        for p, v in group_tensor_shards(g, g.weights())
    )
    masters = ((f"master {piece.name} {piece.start}", view) for _, piece, view in state.optimizer.master_weights())
    moments = ((f"{kind} {piece.name} {piece.start}", view) for kind, _, piece, view in state.optimizer.moments())
    return {name: view.detach().clone() for part in (weights, masters, moments) for name, view in part}


def _rounded(model: ParallelModel) -> int:
    return sum(
        int((own != group.flat_weights[slice(*group.owned_range(bucket))]).sum())
        for group in model.param_groups
        if isinstance(group, FlatParamGroup)
        for own, bucket in zip(group.weights(), group.buckets, strict=True)
    )


def both(ranks: RankPool, flags: str, world_size: int) -> list[tuple[Outcome, Outcome]]:
    """Every rank's run with and without."""
    eight = ranks.run(_train, world_size, run_of(f"{flags} {GATHER}", world_size))
    return list(zip(eight, ranks.run(_train, world_size, run_of(flags, world_size)), strict=True))


def gathered(outcome: Outcome) -> Counter[torch.dtype]:
    """Bytes, by what they are."""
    found = Counter()
    for event in outcome.events:
        if (event.axis, event.op) == ("shard", "all_gather"):
            found[event.dtype] += event.bytes
    return found


@diagonal(4)
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (f"--dp 2 {ZERO1} {ODD} --fp8-recipe delayed --overlap-param-gather --ddp-bucket-size 1", 2),
        (f"--dp 2 --tp 2 {ZERO1} --sequence-parallel --hidden-size 64 --ddp-bucket-size 1000000 {THREE}", 4),
        later(f"--dp 2 {ZERO1} {SQUARES} --overlap-param-gather", 2),
        (f"--dp 2 {ZERO2} {ODD}", 2),
        (f"--dp 2 {ZERO3} {SQUARES}", 2),
        later(f"--dp 4 {ZERO1} --num-distributed-optimizer-instances 2 --micro-batch-size 1 {ODD}", 4),
        later(f"--dp 2 {ZERO1} {ODD} --no-bf16", 2),
        later(f"--dp 2 {ZERO3} {ODD} --no-bf16", 2),
        later(f"--dp 2 --pp 2 {ZERO1} --num-layers 4 --fp8-format e4m3 {ODD}", 4),
        later(f"--dp 3 {ZERO1} {SQUARES} --global-batch-size 6", 3),
        later(f"--dp 2 --cp 2 {ZERO1} {ODD} --overlap-param-gather --num-experts 4 --moe-ffn-hidden-size 32", 4),
        later(f"--dp 2 --tp 2 {ZERO3} --hidden-size 64 {THREE}", 4),
        later(f"--dp 3 {ZERO3} {ODD} --global-batch-size 6 --micro-batch-size 1", 3),
        later(f"--dp 3 {ZERO2} {SQUARES} --global-batch-size 6", 3),
    ],
)
def test_the_run_is_the_same(ranks: RankPool, flags: str, world_size: int):
    for ours, wanted in both(ranks, flags, world_size):
        assert ours.numbers == wanted.numbers and ours.evaluated == wanted.evaluated
        assert ours.state.keys() == wanted.state.keys()
        assert [name for name, value in ours.state.items() if not torch.equal(value, wanted.state[name])] == []
        assert len(set(wanted.numbers)) == 3, "it learns"
        assert wanted.rounded == 0 and (ours.rounded > 0) == (ZERO2 not in flags and ZERO3 not in flags)
        assert gathered(ours)[torch.uint8] > 0 == gathered(wanted)[torch.uint8]


@pytest.mark.parametrize("bucket_size", [1, later(10**9)])
def test_bytes_of_the_distributed_optimizer(ranks: RankPool, bucket_size: int):
    """Half for the weights of layers; embedding, head and norms travel as they are. And one exchange of largest numbers."""
    h, ffn = 48, 80
    weights = LAYERS * (4 * h * h + 3 * h * ffn)
    others = 2 * VOCABULARY * h + (2 * LAYERS + 1) * h
    for ours, wanted in both(ranks, f"--dp 2 {ZERO1} {ODD} --ddp-bucket-size {bucket_size}", 2):
        eight, plain = gathered(ours), gathered(wanted)
        assert set(eight) == {torch.uint8, torch.bfloat16} and set(plain) == {torch.bfloat16}
        assert plain[torch.bfloat16] - eight[torch.bfloat16] == 2 * eight[torch.uint8]
        padding = 2 * 64 * len(wanted.state)
        assert weights <= eight[torch.uint8] <= weights + padding
        assert 2 * others <= eight[torch.bfloat16] <= 2 * (others + padding)
        [largest] = [e for e in ours.events if (e.axis, e.op) == ("shard", "all_reduce")]
        assert (largest.elements, largest.dtype) == (4 * LAYERS, torch.int32)
        first = next(index for index, e in enumerate(ours.events) if e.op == "all_gather")
        assert ours.events.index(largest) < first, "it would wait for weights that are under way"
        assert [(e.axis, e.op) for e in ours.events if e is not largest] == [(e.axis, e.op) for e in wanted.events]


def test_bytes_of_fully_sharded_weights(ranks: RankPool):
    """A block's message has a byte for each element of its matrices, and two for those of its norms. Scales last for a step."""
    h, ffn, micro_batches = 64, 96, 2
    sizes = f"--hidden-size {h} --ffn-hidden-size {ffn}"
    for ours, wanted in both(ranks, f"--dp 2 {ZERO3} {sizes}", 2):
        matrices, norms = 4 * h * h + 3 * h * ffn, 2 * h
        gathers = 2 * micro_batches * LAYERS
        assert gathered(ours)[torch.uint8] == gathers * (matrices + 2 * norms)
        assert gathered(wanted)[torch.bfloat16] - gathered(ours)[torch.bfloat16] == gathers * 2 * (matrices + norms)
        largest = [e for e in ours.events if (e.axis, e.op) == ("shard", "all_reduce")]
        assert [(e.elements, e.dtype) for e in largest] == [(4, torch.int32)] * LAYERS


@pytest.mark.matrix
def test_a_checkpoint_is_the_same_and_goes_on_either_way(ranks: RankPool, tmp_path: Path):
    flags = f"--bf16 --fp8-hybrid --dp 2 {ZERO1}"
    whole = trained(ranks, flags, 2)
    before = trained(ranks, f"{flags} {GATHER} --save {tmp_path} --exit-interval 4", 2)
    for way in (GATHER, ""):
        after = trained(ranks, f"{flags} {way} --load {tmp_path}", 2)
        for rank in range(2):
            assert {**before[rank][0], **after[rank][0]} == whole[rank][0]
            for key, tensor in whole[rank][1].items():
                assert torch.equal(after[rank][1][key], tensor), key
