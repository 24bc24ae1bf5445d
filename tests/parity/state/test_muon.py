"""Muon trains the same model in every layout: matrices are iterated whole, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.optim import matrix_update
from petatron.optim.matrix_update import MatrixUpdate
from petatron.optim.update_rules import MatrixBatch
from petatron.sharding.logical_matrices import LogicalMatrix, matrix_shape
from petatron.verify.compare_traces import Tolerances, compare_traces
from petatron.verify.record_trace import StepTrace
from tests.dist import RankFailure, RankPool
from tests.longform import diagonal, later
from tests.parity.harness import check_order, layout_run, reference, tiny_run, train, train_recorded
from tests.parity.state.test_resume import trained

MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --train-iters 2 --num-query-groups 2"
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
BOUNDS = Tolerances(loss=1e-9, gradient=1e-9, parameter=1e-9)


def check(ranks: RankPool, layout: str, model: str, world_size: int) -> list[list[CommEvent]]:
    run = layout_run(layout, model, world_size=world_size, dtype="float64")
    traces, records = map(list, zip(*ranks.run(train_recorded, world_size, run)))
    check_order(records)
    verdict = compare_traces([reference(model, "float64")], traces, BOUNDS)
    assert len(verdict.steps) == 2
    assert verdict.agrees, verdict.first_departure
    return records


@pytest.mark.parametrize(
    ("layout", "world_size"), [("--tp 4", 4), (f"--dp 2 {ZERO1}", 2), later(f"--tp 2 --dp 2 {ZERO2}", 4)]
)
def test_queries_keys_and_values_as_one_matrix(ranks: RankPool, layout: str, world_size: int):
    check(ranks, layout, f"{MUON} --muon-no-split-qkv", world_size)


def train_without_gathering(run: RunConfig) -> list[StepTrace]:
    """Muon with matrices that are not whole: every tensor-parallel rank orthogonalizes its shard by itself."""

    def shards_alone(self: MatrixUpdate, matrices: Sequence[LogicalMatrix], local: Sequence[Sequence[Tensor]]):
        return [torch.cat(list(shards)) for shards in local]

    def own_rows(matrix: LogicalMatrix, result: Tensor) -> list[Tensor]:
        return list(result.split([matrix_shape(shard.shape)[0] for shard in matrix.shards]))

    def each_alone(self: MatrixUpdate, planned: Any, inputs: Sequence[Sequence[Tensor]], step: Any, frozen: Any):
        batches = (MatrixBatch((shard[None],), {}, torch.ones(1, 1, 1)) for shard in inputs[0])
        return [self._rule.transform(batch)[0] for batch in batches]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MatrixUpdate, "_transform", each_alone)
        patch.setattr(MatrixUpdate, "_gather_over_tensor_parallel", shards_alone)
        patch.setattr(matrix_update, "_local_parts", own_rows)
        return train(run)


def test_orthogonalized_shards_are_another_model(ranks: RankPool):
    """So that the comparisons above could fail; the first update, at the start of warm-up, moves nothing."""
    traces = ranks.run(train_without_gathering, 2, tiny_run(f"{MUON} --tp 2", world_size=2, dtype="float64"))
    verdict = compare_traces([reference(MUON, "float64")], traces, BOUNDS)
    assert verdict.first_departure is not None and verdict.first_departure.startswith("step 2: parameter layers.")


@pytest.mark.parametrize(("bucket_size", "exchanged"), [(20_000, False), (1, True)])
def test_a_rank_that_owns_a_matrix_asks_nobody_for_it(ranks: RankPool, bucket_size: int, exchanged: bool):
    """Two layers divide evenly over two ranks; a bucket of one matrix does not."""
    records = check(ranks, f"--dp 2 {ZERO1} --ddp-bucket-size {bucket_size}", MUON, 2)
    assert all(any(event.op == "all_to_all" for event in events) is exchanged for events in records)


@diagonal(3)
@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ("", "--optimizer muon", "adam, and muon has another"),
        ("--optimizer muon", "", "muon, and adam has another"),
        ("--optimizer muon", "--optimizer sgd", "muon, and sgd has another"),
        later("--optimizer soap", "", "soap, and adam has another"),
        later("", "--optimizer lion", "adam, and lion has another"),
        later("--optimizer lion", "--optimizer adafactor", "lion, and adafactor has another"),
    ],
)
def test_another_optimizer_does_not_take_over(ranks: RankPool, tmp_path: Path, saved: str, loaded: str, message: str):
    trained(ranks, f"{saved} --save {tmp_path} --exit-interval 1", 1)
    with pytest.raises(RankFailure, match=message):
        trained(ranks, f"{loaded} --load {tmp_path}", 1)
    trained(ranks, f"{loaded} --load {tmp_path} --no-load-optim --train-iters 2", 1)
