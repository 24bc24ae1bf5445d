"""Objectives of preferences train the same in every layout, on pairs that share rows and on pairs of two rows."""

from __future__ import annotations

from pathlib import Path

import pytest

import petatron
from petatron.mesh.mesh import ParallelMesh
from tests.dist import RankPool
from tests.longform import later
from tests.parity.harness import check_layout, tiny_run

ORPO = "--objective orpo --objective-settings beta=0.5"
SIMPO = "--objective simpo --dataset-settings packed=false"
REWARD = "--objective reward --num-labels 1 --pooling last"
DPO = "--objective dpo --objective-settings beta=0.5 reference={reference}"
KTO = "--objective kto --objective-settings beta=0.5 reference={reference}"
LAYOUTS = {
    "--tp 2 --sequence-parallel": 2,
    "--pp 2": 2,
    "--cp 2": 2,
    "--dp 2 --use-distributed-optimizer": 2,
    "--dp 2 --data-parallel-sharding-strategy optim_grads_params": 2,
}
AT_ONCE = {
    ORPO: ("--cp 2", "--pp 2"),
    SIMPO: ("--dp 2 --data-parallel-sharding-strategy optim_grads_params",),
    REWARD: ("--tp 2 --sequence-parallel",),
    DPO: ("--cp 2",),
    KTO: (),
}
"""The layouts of the default suite."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reference"
    petatron.build_model(tiny_run("--seed 2", dtype="float64"), ParallelMesh.single()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("objective", "layout"),
    [(x, layout) if layout in AT_ONCE[x] else later(x, layout) for x in AT_ONCE for layout in LAYOUTS],
)
def test_every_layout_trains_the_same(ranks: RankPool, reference: Path, objective: str, layout: str):
    # The divergence that kto estimates is of a micro-batch on all data-parallel ranks: four samples in each layout.
    sizes = "--micro-batch-size 2" if "--dp 2" in layout else "--micro-batch-size 4"
    flags = objective.format(reference=reference)
    if objective == KTO:
        layout, flags = f"{layout} {sizes}", f"{flags} --micro-batch-size 4"
    check_layout(ranks, layout, flags, world_size=LAYOUTS[layout.split(" --micro")[0]])
