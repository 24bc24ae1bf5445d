"""Every combination of context-parallel size, communication and hierarchy either has its process groups or is refused as a ConfigError."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.context import apply_context_parallel
from petatron.pretrained.launch_and_build_model import used_axes
from petatron.validate import load_config
from petatron.verify.verify_layouts import plan_verification

TRAIN = "--preset tiny-llama --mock-data --train-iters 1 --lr 1e-3".split()
HIERARCHIES = ((), (1, 1), (2, 2), (1, 4), (4, 1), (2, 1), (1, 2), (2, 4), (3, 2), (2,), (2, 2, 2), (0, 4))


def flags(cp: int, kind: str, sizes: tuple[int, ...]) -> list[str]:
    hierarchy = ["--hierarchical-context-parallel-sizes", *map(str, sizes)] if sizes else []
    return [*TRAIN, "--cp", str(cp), "--cp-comm-type", kind, *hierarchy]


def open_axes(run: RunConfig) -> None:
    """Does what building a model does with the context-parallel settings, on every rank."""
    for rank in range(run.parallel.world_size):
        mesh = ParallelMesh(Layout.from_config(run.parallel), rank, backend="fake")
        for name in used_axes(run, {}):
            mesh.axis(name)
        sizes = run.parallel.hierarchical_context_parallel_sizes
        apply_context_parallel(nn.Module(), mesh, comm_type=run.parallel.cp_comm_type, hierarchical_sizes=sizes)


def test_every_combination_builds_or_is_refused():
    accepted: set[tuple[int, str, tuple[int, ...]]] = set()
    for cp, kind, sizes in itertools.product((1, 2, 4), ("p2p", "all_gather", "a2a", "a2a+p2p"), HIERARCHIES):
        try:
            run = load_config(flags(cp, kind, sizes)).config
        except ConfigError:
            continue
        accepted.add((cp, kind, sizes))
        open_axes(run)
    hierarchical = {(cp, sizes) for cp, kind, sizes in accepted if kind == "a2a+p2p" and cp > 1}
    assert hierarchical == {(2, ()), (2, (2, 1)), (2, (1, 2)), (4, ()), (4, (2, 2)), (4, (1, 4)), (4, (4, 1))}
    assert all(sizes == () for _, kind, sizes in accepted if kind != "a2a+p2p")


def test_a_hierarchy_without_context_parallelism_has_no_effect_and_says_so():
    loaded = load_config(flags(1, "a2a+p2p", (2, 2)))
    notice = "--hierarchical-context-parallel-sizes has no effect: the context-parallel size is 1"
    assert notice in loaded.notices
    open_axes(loaded.config)


def test_what_is_no_hierarchy_is_refused_at_any_size():
    with pytest.raises(ConfigError, match="2 2 2 is not two positive numbers"):
        load_config(flags(1, "a2a+p2p", (2, 2, 2)))


def test_the_reference_of_a_verified_hierarchy_builds():
    plan = plan_verification(flags(4, "a2a+p2p", (2, 2)), steps=1, dtype="float32")
    for loaded in (plan.reference, plan.candidate):
        open_axes(loaded.config)
