"""Lookups in a table whose rows are on several ranks: the rows and gradients of one rank, and messages of distinct rows alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petatron.layers.spec.param_spec import ParamSpec
from petatron.layers.vocabulary.row_sharded_table import PADDING_ID, RowShardedTable
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel import tensor_parallel
from petatron.parallel.row_exchange import apply_row_sharding, row_axis
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.row_sharded_group import RowShardedGroup
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard
from tests.dist import RankPool

ROWS, WIDTH = 11, 2  # 4 ranks have 3, 3, 3 and 2 rows; 8 have 2 and the last two 1 and none
PARAMS = {
    "table.weight": ParamSpec(shape=(ROWS, WIDTH), shard=Shard(tp=0, pad_to=1, rows_over_data=True), role="vocabulary")
}
WEIGHT = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)


def ids_of(rank: int) -> Tensor:
    """Rank 1 looks nothing up; others have ids twice, and padding."""
    if rank == 1:
        return torch.full((2, 2), PADDING_ID)
    return torch.tensor([[0, 5 + rank, 10, PADDING_ID], [5 + rank, 3, 3, rank]])


def lookups(layout: Layout) -> tuple[list[Tensor], list[tuple[str, int]]]:
    """Returns output, touched rows of the whole table with their gradients, and the sizes of messages."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = ParallelMesh(layout, rank)
    model = torch.nn.Module()
    model.table = table = RowShardedTable(ROWS, WIDTH).to(torch.float64)
    coordinate = ModelParallelCoordinate.from_mesh(mesh, sequence_parallel=False)
    [placement] = tensor_parallel.shard_params(model, PARAMS, coordinate).values()
    tensor_parallel.apply_tensor_parallel(model, PARAMS, mesh.tp, sequence_parallel=False, shared_generator=None)
    tensor_parallel.shard_vocabulary(model, PARAMS, mesh.tp, data_axis=row_axis(mesh))
    apply_row_sharding(model, mesh)
    group = RowShardedGroup(table.weight, placement, mesh.tp, GroupSpec(rule="adam"))
    table.row_grad_target = group
    shards = placement.tensor_shards
    with torch.no_grad():
        for shard in shards:
            table.weight[shard.local_slices()] = WEIGHT[shard.logical_slices()]
    out = table(ids_of(mesh.dp.rank))
    rows = table.rows(ids_of(mesh.dp.rank).flatten())
    assert torch.equal(rows.view(*ids_of(mesh.dp.rank).shape, WIDTH), out.transpose(0, 1))
    out.sum().backward()
    first = shards[0].start[0] if shards else 0
    assert group.touched.rows is not None
    sizes = [(event.op, event.elements) for event in mesh.record.events()]
    return [out.detach(), group.touched.rows + first, group.touched.grads], sizes


def whole_gradient(dp: int) -> Tensor:
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank in range(dp):
        ids = ids_of(rank).flatten()
        out.index_add_(0, ids[ids >= 0], torch.ones(int((ids >= 0).sum()), WIDTH, dtype=torch.float64))
    return out


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_rows_and_gradients_are_those_of_one_rank(ranks: RankPool, dp: int, tp: int):
    layout = Layout(dp_shard=dp, tp=tp)
    results = [lookups(layout)] if dp * tp == 1 else ranks.run(lookups, dp * tp, layout)
    touched = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank, ((out, rows, grads), _) in enumerate(results):
        ids = ids_of(rank // tp)
        expected = torch.where((ids >= 0).unsqueeze(-1), WEIGHT[ids.clamp(min=0)], 0.0)
        assert torch.equal(out, expected.transpose(0, 1))
        assert len(set(rows.tolist())) == len(rows)
        touched[rows] += grads
    assert torch.equal(touched, whole_gradient(dp))


def test_ranks_send_distinct_rows_and_never_a_table(ranks: RankPool):
    results = ranks.run(lookups, 4, Layout(dp_shard=4))
    for rank, (_, sizes) in enumerate(results):
        assert {op for op, _ in sizes} == {"all_to_all"}
        distinct = len(set(ids_of(rank).flatten().tolist()) - {PADDING_ID})
        counts, ids, rows, *_, grads = (elements for _, elements in sizes)
        assert (counts, ids, grads) == (4, distinct, distinct * WIDTH)
        assert rows % WIDTH == 0
    # All that owners send is what was asked for.
    assert sum(sizes[2][1] for _, sizes in results) == sum(sizes[-1][1] for _, sizes in results)
