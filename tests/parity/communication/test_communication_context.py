"""A training step's exchanges between context-parallel ranks are those of theory, and there are no others.

With `kv` the elements of a rank's keys and values of one micro-batch and layer and `q` those of its queries, over c ranks:

    p2p          2 (c - 1) sends of kv / 2 forward, 4 (c - 1) backward
    all_gather   a gather of c kv forward; the same and a reduce-scatter of c kv backward
    a2a          an exchange of q + kv and one of q forward; the same backward
    a2a+p2p      those over the ranks that exchange heads, and the first line's over the rings

Attention is all they have to do with each other, but for the reductions over data x context parallel ranks.
"""

from collections import Counter

import pytest
import torch.distributed as dist

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loader, build_model
from tests.dist import RankPool
from tests.longform import diagonal, later
from tests.parity.harness import tiny_run

S, H, LAYERS, HEADS, GROUPS, WIDTH = 16, 32, 2, 4, 4, 8


def one_step(run: RunConfig) -> list[CommEvent]:
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    model = build_model(run, mesh)
    batches = next(iter(build_loader(run, mesh)))
    before = mesh.record.count
    model.train_step(batches)
    return mesh.record.events(since=before)


def context_events(events: list[CommEvent]) -> Counter[tuple[str, str, int, int]]:
    return Counter((e.axis, e.op, e.elements, e.bytes) for e in events if e.axis.split("/")[0].split("%")[0] == "cp")


def theory(kind: str, cp: int, *, key: int, q: int, times: int, itemsize: int) -> Counter[tuple[str, str, int, int]]:
    def events(axis: str, op: str, count: int, elements: int) -> Counter[tuple[str, str, int, int]]:
        return Counter({(axis, op, elements, itemsize * elements): count * times})

    def shifts(axis: str, count: int, elements: int) -> Counter:
        """What a rank passes on around the ring, and as much that it takes."""
        return events(axis, "send", count, elements) + events(axis, "receive", count, elements)

    if kind == "p2p":
        return shifts("cp", 6 * (cp - 1), key)
    if kind == "all_gather":
        return events("cp", "all_gather", 2, 2 * cp * key) + events("cp", "reduce_scatter", 1, 2 * cp * key)
    heads = "cp" if kind == "a2a" else "cp/2"
    swaps = events(heads, "all_to_all", 2, q + 2 * key) + events(heads, "all_to_all", 2, q)
    return swaps if kind == "a2a" else swaps + shifts("cp%2", 6 * (cp // 2 - 1), key)


@diagonal(2)
@pytest.mark.parametrize(("kind", "cp"), [("p2p", 2), ("p2p", 4), ("all_gather", 4), ("a2a", 4), ("a2a+p2p", 4)])
@pytest.mark.parametrize(("b", "model"), [(2, ""), later(4, "--window-size 3 --reset-attention-mask --bf16")])
def test_every_exchange_of_a_step(ranks: RankPool, kind: str, cp: int, b: int, model: str):
    sizes = "--hierarchical-context-parallel-sizes 2 2" if kind == "a2a+p2p" else ""
    flags = f"--cp {cp} --cp-comm-type {kind} {sizes} --micro-batch-size {b} {model}"
    micro_batches, itemsize = 8 // b, 2 if "bf16" in model else 4
    key, q = (S // cp * b * heads * WIDTH for heads in (GROUPS, HEADS))
    expected = theory(kind, cp, key=key, q=q, times=LAYERS * micro_batches, itemsize=itemsize)
    for events in ranks.run(one_step, cp, tiny_run(flags, world_size=cp)):
        assert context_events(events) == expected


def test_tensor_parallel_ranks_exchange_their_own_heads(ranks: RankPool):
    """Each tensor-parallel rank has half the heads, so half as much travels."""
    flags = "--tp 2 --sequence-parallel --cp 2 --cp-comm-type a2a --micro-batch-size 2"
    half = S // 2 * 2 * HEADS * WIDTH // 2
    for events in ranks.run(one_step, 4, tiny_run(flags, world_size=4)):
        assert context_events(events) == theory("a2a", 2, key=half, q=half, times=LAYERS * 4, itemsize=4)
