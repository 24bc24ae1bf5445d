"""The proof matrix on the rank pool: its core in every run of the suite, all of it by `make test-matrix`.

The core has layouts that no other page here has: sharded optimizers, pairs that cross two of the pages, and the largest
products; in float64 over a few steps, where a departure is either rounding (1e-15) or a bug. Some also run in
float32, a small model for the 20 steps of the promise. What belongs to one kind of parallelism is beside this page:
`test_tensor_data.py`, `test_pipeline.py`, `test_context.py`, `test_experts.py`, `test_fsdp.py`.
"""

from __future__ import annotations

from functools import cache

import pytest

from petatron.validate import load_config
from petatron.verify.compare_traces import compare_traces
from petatron.verify.proof_matrix import MATRIX, MATRIX_TOLERANCES, MatrixEntry, parse_entry
from petatron.verify.random_model_shapes import random_model_flags
from petatron.verify.record_trace import StepTrace
from petatron.verify.run_proof_matrix import make_case
from tests.dist import RankPool
from tests.longform import diagonal
from tests.parity.harness import check_layout, check_order, train, train_recorded

CORE = """
dense:dp4-zero1 dense:dp4-zero1-copies2 moe:dp4.etp4 gpt:pp2-zbv
dense:tp2-sp.pp2-vpp2 dense:tp2-sp.dp2-zero1 dense:pp2.cp2 dense:pp2-vpp2.dp2-zero1
gpt:cp2.dp2-zero1 gpt:pp2-vpp2.dp2-fsdp
dense:cp2.dp2-fsdp dense:pp2-vpp2.cp2
gpt:tp4-sp-overlap dense:tp2-sp-overlap.recompute-full dense:tp2-sp-overlap.pp2-zbh1 moe:tp2-sp-overlap.dp2.ep2
moe:pp2-vpp2.dp2.ep2-overlap
moe:tp2-sp.pp2.cp2.ep4.etp1
mla:pp2.dp2.ep2
bert:tp2-sp.pp2 bert:cp2 bert:dp2-fsdp
recommender:dp4-zero1 hstu:tp2-sp.pp2
t5:tp2-sp.pp2-encoder1.cp2 t5moe:dp2.ep2
vlm:tp2-sp.cp2 vlm:dp2-fsdp
classifier:dp2-fsdp embedder:tp2-sp.dp2-fsdp-micro1
""".split()
SINGLE_PRECISION = ["dense:pp2-vpp2", "moe:dp2.ep2"]
"""For three steps; `test_whole` takes 20 in every layout."""


@cache
def _reference(argv: tuple[str, ...]) -> list[StepTrace]:
    return train(load_config(argv).config)


def _check(ranks: RankPool, found: MatrixEntry, *, steps: int, dtype: str, model_flags: str | None = None) -> None:
    case = make_case(found, model_flags=model_flags or found.model_flags, steps=steps, dtype=dtype)
    run = load_config(case.argv, world_size=case.world_size).config
    traces, records = map(list, zip(*ranks.run(train_recorded, case.world_size, run)))
    check_order(records)
    verdict = compare_traces([_reference(case.reference_argv)], traces, MATRIX_TOLERANCES[dtype])
    assert len(verdict.steps) == steps
    assert verdict.agrees, f"{verdict.first_departure}\n{case.command}"


@diagonal(3)
@pytest.mark.parametrize("name", CORE)
def test_core(ranks: RankPool, name: str):
    found = parse_entry(name)
    _check(ranks, found, steps=2, dtype="float64", model_flags=f"{found.model_flags} {_small(found)}")


def _small(found: MatrixEntry) -> str:
    """A model of two layers, four where ranks have two stages each, on two micro-batches of every rank, four in a pipeline: in the
    matrix itself models have four layers, and 16 samples in every layout."""
    words = f"{found.model_flags} {found.flags} --train-iters 2".split()
    parallel = load_config(words, world_size=found.world_size).config.parallel
    micro_batches = 4 if parallel.pipeline_model_parallel_size > 1 else 2
    batch = f"--global-batch-size {parallel.data_parallel_size * 2 * micro_batches}"
    if "vpp" in found.name or "zbv" in found.name:
        return batch
    return f"{batch} --num-layers 2 {'--moe-layer-freq [0,1]' if '--num-experts' in found.model_flags else ''}"


@pytest.mark.parametrize("name", SINGLE_PRECISION)
def test_single_precision(ranks: RankPool, name: str):
    found = parse_entry(name)
    _check(ranks, found, steps=3, dtype="float32", model_flags=f"{found.model_flags} {_small(found)}")


@pytest.mark.matrix
def test_twenty_steps_in_single_precision(ranks: RankPool):
    layout = "--dp 2 --use-distributed-optimizer --overlap-param-gather --micro-batch-size 1"
    small = "--num-layers 1 --seq-length 8 --global-batch-size 4"
    assert len(check_layout(ranks, layout, small, world_size=2, dtype="float32").steps) == 20


@pytest.mark.matrix
@pytest.mark.parametrize("found", MATRIX, ids=lambda found: found.name)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_whole(ranks: RankPool, found: MatrixEntry, dtype: str):
    _check(ranks, found, steps=20, dtype=dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("found", MATRIX, ids=lambda found: found.name)
def test_random_models(ranks: RankPool, found: MatrixEntry):
    _check(ranks, found, steps=3, dtype="float64", model_flags=random_model_flags(found, seed=1))


def test_core_is_of_the_matrix():
    assert {*CORE, *SINGLE_PRECISION} <= {found.name for found in MATRIX}
