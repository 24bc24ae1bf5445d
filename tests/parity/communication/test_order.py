"""Whole runs issue their communication in an order in which NCCL cannot hang: training, evaluation, saves in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from petatron.base.device import detect_device
from petatron.config import RunConfig
from petatron.mesh.comm_record import CommEvent
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.train.build_run import build_loaders
from petatron.train.state.train_state import TrainState
from petatron.train.training_loop import TrainLoop
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_order, tiny_run

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
TIED = "--no-untie-embeddings-and-output-weights"


def _run(run: RunConfig) -> list[CommEvent]:
    torch.set_num_threads(1)
    mesh = ParallelMesh(Layout.from_config(run.parallel), dist.get_rank())
    state = TrainState.build(run, mesh)
    TrainLoop(state, build_loaders(run, mesh), [], detect_device("cpu")).run()
    events = mesh.record.events()
    assert len(events) == mesh.record.count
    return events


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        (f"--pp 2 --dp 2 --use-distributed-optimizer --overlap-param-gather --bf16 {TIED}", 4),
        later(
            f"--dp 2 --tp 2 --ep 2 --sequence-parallel --bf16 --data-parallel-sharding-strategy optim_grads_params {EXPERTS}",
            4,
        ),
        later(f"--pp 2 --cp 2 --tp 2 --sequence-parallel --pipeline-schedule zb-h1 {TIED}", 8),
    ],
)
def test_train_evaluate_and_save(ranks: RankPool, tmp_path: Path, layout: str, world_size: int):
    often = "--train-iters 4 --eval-interval 2 --eval-iters 1 --save-interval 2 --async-save"
    run = tiny_run(f"{often} --save {tmp_path} {layout}", world_size=world_size)
    records = ranks.run(_run, world_size, run)
    axes = {event.axis for events in records for event in events}
    assert {"background_control", "control"} <= axes and ("pp" in axes) == ("--pp" in layout)
    check_order(records)
    with pytest.raises(AssertionError, match="missing"):
        check_order([records[0][:-1], *records[1:]])
